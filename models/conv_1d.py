"""A 1-D network for sound and motion: series of feature vectors [time, features], such as log-mel frames or the axes of
an accelerometer.

1-D convolutions become 2-D convolutions of height 1 in the .tflite file, which the Edge TPU runs. Strides halve the
series in every block.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import keras


def build(input_shape, classes, filters=(32, 48, 64, 96), kernel=5, dropout=0.3):
    """Return the model.

    Args:
        input_shape: (time, features) of a preprocessed sample; (time, features, 1) works, too.
        classes: number of classes.
        filters: channels of each block; each block halves the series.
        kernel: number of steps that a convolution sees.
        dropout: fraction of the features that the training sets to 0.
    """
    layers = keras.layers
    series = keras.Input(input_shape, name="series")
    x = series
    if len(input_shape) == 3:
        x = layers.Reshape((input_shape[0], input_shape[1] * input_shape[2]), name="features")(x)
    for index, channels in enumerate(filters):
        x = layers.Conv1D(channels, kernel, 2, "same", use_bias=False, name=f"block{index}")(x)
        # 0.9, not Keras' 0.99: the averages must settle within a short training.
        x = layers.BatchNormalization(momentum=0.9, name=f"block{index}_norm")(x)
        x = layers.ReLU(name=f"block{index}_relu")(x)
    x = layers.GlobalAveragePooling1D(name="pooling")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(series, layers.Dense(classes, activation="softmax", name="scores")(x), name="conv_1d")
