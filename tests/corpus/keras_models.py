"""Keras: recurrent and convolutional nets from its layers and applications, and its own optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import optax
from keras import layers
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import Rules, floats, ints, largest_dim, replicated, specs_by
from .keras_training import abstract, keras_step

PACKAGE = "keras"
VOCAB = 32768


def mean_of(loss: keras.losses.Loss) -> Any:
    """A loss of Keras as (outputs, targets) -> mean."""
    return lambda outputs, targets: loss(targets, outputs)


CLASSES = mean_of(keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def language_model(hidden: int, depth: int, length: int) -> keras.Model:
    """LSTMs with dropout and layer norms."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(VOCAB, hidden)(tokens)
    for _ in range(depth):
        x = layers.LayerNormalization()(layers.LSTM(hidden, return_sequences=True)(x))
        x = layers.Dropout(0.2, seed=0)(x)
    return keras.Model(tokens, layers.Dense(VOCAB, name="head")(x))


def lstm(sizes: Sizes) -> Step:
    """The train step with Keras' Adam, clipped by the global norm."""
    model = abstract(partial(language_model, 2048, 3, 128))
    tokens = ints(64, 128)
    optimizer = keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
    return keras_step(model, CLASSES, tokens, tokens, sizes, weights=partial(specs_by, GATES), optimizer=optimizer)


def speech_model(hidden: int, frames: int) -> keras.Model:
    """Convolutions over spectrograms, then bidirectional GRUs: logits of characters."""
    spectrogram = keras.Input((frames, 128, 1))
    x = spectrogram
    for filters, kernel in ((32, (11, 41)), (64, (11, 21))):
        x = layers.Conv2D(filters, kernel, (2, 2), "same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Reshape((frames // 4, -1))(x)
    for _ in range(4):
        x = layers.Bidirectional(layers.GRU(hidden, return_sequences=True))(x)
    return keras.Model(spectrogram, layers.Dense(64, name="head")(x))


def speech(sizes: Sizes) -> Step:
    """The train step with the loss of connectionist temporal classification."""
    model = abstract(partial(speech_model, 1024, 1024))
    batch = floats(64, 1024, 128, 1), ints(64, 128)
    return keras_step(model, mean_of(keras.losses.CTC()), *batch, sizes, weights=partial(specs_by, GATES))


def text_model(vocab: int, features: int, length: int) -> keras.Model:
    """Separable convolutions with residuals, and the maximum over time."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocab, features)(tokens)
    for dilation in (1, 2, 4, 8):
        h = layers.SeparableConv1D(4 * features, 7, padding="same", dilation_rate=dilation, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Conv1D(features, 1)(h))
    x = layers.GlobalMaxPooling1D()(x)
    return keras.Model(tokens, layers.Dense(128, name="head")(layers.Dropout(0.1, seed=0)(x)))


def text(sizes: Sizes) -> Step:
    """A classifier's train step with Keras' AdamW, in float32."""
    model = abstract(partial(text_model, 131_072, 512, 512))
    optimizer = keras.optimizers.AdamW(3e-4)
    rows = ints(128, 512), ints(128)
    return keras_step(model, CLASSES, *rows, sizes, weights=partial(specs_by, WORDS), optimizer=optimizer)


def image_classifier(sizes: Sizes, *, make: Any, rows: int, pixels: int, weights: Any, optimizer: Any = None) -> Step:
    """The train step of an application without pretrained weights."""
    model = abstract(lambda: make(weights=None, input_shape=(pixels, pixels, 3), classifier_activation=None))
    batch = floats(rows, pixels, pixels, 3), ints(rows)
    return keras_step(model, CLASSES, *batch, sizes, weights=weights, optimizer=optimizer)


GATES: Rules = (
    ("*lstm*/kernel", P(None, "model")),
    ("*lstm*/recurrent_kernel", P(None, "model")),
    ("*gru*/kernel", P(None, "model")),
    ("*gru*/recurrent_kernel", P(None, "model")),
    ("embedding*/embeddings", P("model", None)),
    ("head/kernel", P(None, "model")),
)
WORDS: Rules = (
    ("embedding*/embeddings", P("model", None)),
    ("separable_conv1d*/pointwise_kernel", P(None, None, "model")),
    ("conv1d*/kernel", P(None, "model", None)),
)
MOMENTUM = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True))

PROGRAMS: dict[str, MakeProgram] = {
    "lstm, own adam": lstm,
    "speech, ctc": speech,
    "text convolutions, own adamw": text,
    "efficientnet": partial(
        image_classifier,
        make=keras.applications.EfficientNetV2S,
        rows=128,
        pixels=224,
        weights=replicated,
        optimizer=MOMENTUM,
    ),
    "convnext, fsdp": partial(
        image_classifier, make=keras.applications.ConvNeXtLarge, rows=32, pixels=224, weights=largest_dim
    ),
}
