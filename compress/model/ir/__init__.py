"""Networks as plain values that can be analysed, edited and built as Keras models again."""
