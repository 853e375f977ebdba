"""The Edge TPU as a target: rules, placement, rewrites, cost, and the vendor's compiler. No TensorFlow."""

from compress.targets.base import Target
from compress.targets.edgetpu.target import EdgeTpu

TARGET: type[Target] = EdgeTpu
