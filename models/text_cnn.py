"""A small network for texts: an embedding of the tokens, 1-D convolutions, and the average over the positions.

`quantize` cuts the embedding off: the device looks up the vectors on its CPU, and the Edge TPU runs the rest. The
convolutions become 2-D convolutions of height 1 in the .tflite file.

After: Kim, Convolutional Neural Networks for Sentence Classification, EMNLP 2014 (arXiv 1408.5882), with one size of
kernels, and an average instead of the maximum, which is more accurate here.

Copy and edit it. `arguments` under `model:` sets the arguments of `build`.
"""

import keras


def build(input_shape, classes, tokens, width=64, filters=(64,), kernel=3, separable=False, dropout=0.5):
    """Return the model.

    Args:
        input_shape: (length,): the numbers of the tokens of a preprocessed sample, 0 for none.
        classes: number of classes.
        tokens: the largest number of a token: `buckets` of the step `tokens`.
        width: values of a token's vector.
        filters: channels of each convolution.
        kernel: number of positions that a convolution sees.
        separable: use a depthwise and a 1x1 convolution instead of each convolution: fewer weights.
        dropout: fraction of the features that the training sets to 0; of the tokens' vectors, 0.6 times this fraction.
    """
    layers = keras.layers
    text = keras.Input(input_shape, name="tokens")
    x = layers.Embedding(tokens + 1, width, name="embedding")(text)
    x = layers.Dropout(0.6 * dropout, name="embedding_dropout")(x)
    for index, channels in enumerate(filters):
        name = f"block{index}"
        if separable:
            x = layers.DepthwiseConv1D(kernel, padding="same", use_bias=False, name=f"{name}_depthwise")(x)
            x = layers.Conv1D(channels, 1, use_bias=False, name=name)(x)
        else:
            x = layers.Conv1D(channels, kernel, padding="same", use_bias=False, name=name)(x)
        # 0.9, not Keras' 0.99: the averages must settle within a short training.
        x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
        x = layers.ReLU(6.0, name=f"{name}_relu")(x)
    x = layers.GlobalAveragePooling1D(name="pooling")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(text, layers.Dense(classes, activation="softmax", name="scores")(x), name="text_cnn")
