"""Train steps, forward, backward and update, of programs that people train: tiny, each annotated in two styles."""
