"""A small convolutional network for grey 32x32 images: the model of the shipped pipeline.yaml.

Copy and edit it: a builder is a Python file with a function `build(input_shape, classes)` that returns a Keras model.
"""

import keras


def build(input_shape, classes):
    """Return a model of four 3x3 convolutions, each with batch norm and ReLU, and one dense layer.

    Args:
        input_shape: (height, width, channels) of a preprocessed sample.
        classes: number of classes.
    """
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x = image
    for block, (filters, stride) in enumerate([(16, 2), (24, 2), (32, 1), (48, 2)]):
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False, name=f"conv{block}")(x)
        # 0.9, not Keras' 0.99: the averages must settle within a short training.
        x = layers.BatchNormalization(momentum=0.9, name=f"norm{block}")(x)
        x = layers.ReLU(name=f"relu{block}")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax", name="scores")(x), name="digits_cnn")
