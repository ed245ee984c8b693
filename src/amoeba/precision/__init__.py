"""Low precision: number formats, quantised matrices and experts, and the fp8 training recipes."""

from amoeba.precision.formats import (
    E2M1,
    E4M3,
    FORMATS,
    FP8_128,
    FP8_128_ROWS,
    FP8_TRAINING,
    FP8_TRAINING_ROWS,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
)
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.precision.unchanged_weights import UnchangedWeights

__all__ = [
    "E2M1",
    "E4M3",
    "FORMATS",
    "FP8_128",
    "FP8_128_ROWS",
    "FP8_TRAINING",
    "FP8_TRAINING_ROWS",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Format",
    "QuantisedMatrix",
    "UnchangedWeights",
    "quantise",
]
