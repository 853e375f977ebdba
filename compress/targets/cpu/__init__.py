"""The CPU as a target: every operator runs, and nothing is compiled."""

from compress.targets.base import Target
from compress.targets.cpu.target import Cpu

TARGET: type[Target] = Cpu
