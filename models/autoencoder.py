"""An autoencoder for windows of one sensor: anomalies are windows that it cannot reconstruct.

Dense layers compress a window [values] to a few numbers, and make the window from them again. Trained on normal windows
alone, it only learns the shapes that normal windows have. The code must be small: with many numbers, everything can be
reconstructed, anomalies included.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import keras


def build(input_shape, classes, hidden=64, code=2):
    """Return the model.

    Args:
        input_shape: (values,) of a preprocessed window.
        classes: not used: the output has the shape of the window.
        hidden: units of the layers between window and code.
        code: numbers to which a window is compressed.
    """
    layers = keras.layers
    window = keras.Input(input_shape, name="window")
    x = layers.Dense(hidden, activation="relu", name="encoder")(window)
    x = layers.Dense(code, name="code")(x)
    x = layers.Dense(hidden, activation="relu", name="decoder")(x)
    return keras.Model(window, layers.Dense(input_shape[0], name="reconstruction")(x), name="autoencoder")
