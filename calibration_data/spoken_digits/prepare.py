"""Write the spoken digits as WAV files with a table: `python prepare.py SOURCE data/spoken_digits`.

SOURCE is a clone of Jakobovski/free-spoken-digit-dataset, or an .npz file with the same recordings one after another
(audio, offsets, y, speaker, is_test).

labels.csv has the columns file, digit, speaker and two splits:
    speaker_split   the speakers of the test split are in no other split; recordings 0 to 4 of the other speakers are
                    the validation split
    official_split  recordings 0 to 4 of every digit and speaker are the test split, as the authors of the data define
                    it; recordings 5 to 9 are the validation split. All speakers are in all splits
"""

import argparse
import csv
import shutil
import wave
from pathlib import Path

import numpy as np

RATE = 8000
TEST_SPEAKERS = ("theo", "yweweler")


def recordings(source):
    """Yield digit, speaker, number and the WAV file, or the values, of every recording."""
    if source.suffix == ".npz":
        with np.load(source) as file:
            audio, offsets, digits, speakers = (file[name] for name in ("audio", "offsets", "y", "speaker"))
            is_test = file["is_test"]
        counts = {}
        for index, (digit, speaker) in enumerate(zip(digits.tolist(), speakers.tolist(), strict=True)):
            # The numbers are not in the file: test recordings are 0 to 4, the others 5 to 49.
            key = (digit, speaker, bool(is_test[index]))
            number = counts.get(key, 0 if is_test[index] else 5)
            counts[key] = number + 1
            yield digit, speaker, number, audio[offsets[index] : offsets[index + 1]]
        return
    files = sorted((source / "recordings").glob("*_*_*.wav"))
    if not files:
        raise SystemExit(f"{source}: no files recordings/DIGIT_SPEAKER_NUMBER.wav; allowed: a clone of the data set")
    for file in files:
        digit, speaker, number = file.stem.split("_")
        yield int(digit), speaker, int(number), file


def write_wav(path, values):
    """Write int16 values as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(values.astype("<i2").tobytes())


def main():
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone, or the .npz file")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--test-speakers", nargs="+", default=TEST_SPEAKERS, help="speakers of the test split")
    options = parser.parse_args()
    folder = options.out / "recordings"
    folder.mkdir(parents=True, exist_ok=True)
    rows, speakers = [], set()
    for digit, speaker, number, sound in recordings(options.source):
        name = f"{digit}_{speaker}_{number}.wav"
        if isinstance(sound, Path):
            shutil.copyfile(sound, folder / name)
        else:
            write_wav(folder / name, sound)
        held_out = speaker in options.test_speakers
        by_speaker = "test" if held_out else "validation" if number < 5 else "train"
        official = "test" if number < 5 else "validation" if number < 10 else "train"
        rows.append((f"recordings/{name}", digit, speaker, by_speaker, official))
        speakers.add(speaker)
    if unknown := set(options.test_speakers) - speakers:
        raise SystemExit(f"no recordings of {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(speakers))}")
    with (options.out / "labels.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("file", "digit", "speaker", "speaker_split", "official_split"))
        writer.writerows(rows)
    print(f"{options.out}: {len(rows)} recordings of {len(speakers)} speakers")


if __name__ == "__main__":
    main()
