"""The interface of the vendor's library `pycoral` 2.0, for models and bundles of Coralline and for any .tflite file.

A program that was written for `pycoral` runs when its imports say `coralline_pycoral`::

    from coralline_pycoral.adapters import classify, common
    from coralline_pycoral.utils.edgetpu import make_interpreter

Names, parameters and results are those of `pycoral`, so they do not follow the conventions of this project. New
programs should use `deploy.Model`, which also does the preprocessing.
"""
