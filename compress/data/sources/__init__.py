"""The data sources, one module for each format."""

from compress.data.source import Source
from compress.data.sources.arrays import Npy, Npz
from compress.data.sources.built_in import Digits, RandomSamples
from compress.data.sources.coco import Coco
from compress.data.sources.images import ImageFolder
from compress.data.sources.masks import Masks
from compress.data.sources.python_function import PythonFunction
from compress.data.sources.text import TextTable
from compress.data.sources.tfrecord import TfRecord
from compress.data.sources.time_series import Csv
from compress.data.sources.voc import Voc
from compress.data.sources.wav import Wav
from compress.data.sources.yolo import Yolo

SOURCES: dict[str, type[Source]] = {
    source.name: source
    for source in (
        Digits,
        Npz,
        Npy,
        ImageFolder,
        Csv,
        Wav,
        TfRecord,
        PythonFunction,
        Voc,
        Coco,
        Yolo,
        Masks,
        RandomSamples,
        TextTable,
    )
}

__all__ = [
    "SOURCES",
    "Coco",
    "Csv",
    "Digits",
    "ImageFolder",
    "PythonFunction",
    "Masks",
    "Npy",
    "Npz",
    "RandomSamples",
    "TextTable",
    "TfRecord",
    "Voc",
    "Wav",
    "Yolo",
]
