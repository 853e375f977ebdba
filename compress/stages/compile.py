"""`compile`: the vendor's compiler where there is one, and what the static check expects of it."""

from __future__ import annotations

import shutil
from typing import Annotated, ClassVar

from pydantic import Field

from compress.edgetpu import compiler
from compress.edgetpu.check import check
from compress.stage import MODEL_EDGETPU, MODEL_TFLITE, Artifact, Context, Facts, Kind, Need, Stage
from compress.target import Target, load
from compress.tflite import graph


class Compile(Stage):
    """Compiles for the Edge TPU if the vendor's compiler is found; checks statically in any case."""

    name: ClassVar[str] = "compile"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE})
    produces: ClassVar[Kind] = Kind.COMPILED
    needs: ClassVar[frozenset[Need]] = frozenset({"target"})

    compiler: str | None = None
    """Path of edgetpu_compiler; by default the one on PATH, if any."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long the compiler may take."""

    def skip(self, given: Kind, *, from_file: bool, target: Target) -> str | None:
        """A target without accelerator needs no compiler."""
        return None if target.accelerated else f"the target {target.name} needs no compiler"

    def environment(self) -> dict[str, str]:
        """Which compiler there is."""
        return compiler.identity(compiler.find(self.compiler, load("edgetpu")))

    def run(self, given: Artifact, context: Context) -> Facts:
        """The placement, and the compiled model if there is a compiler."""
        model = context.folder / MODEL_TFLITE
        shutil.copyfile(given.file(MODEL_TFLITE), model)
        facts: Facts = {"placement": check(graph.read(model), context.target).to_json(), "compiled": False}
        program = compiler.find(self.compiler, context.target)
        if program is None:
            facts["reason"] = f"not compiled: {context.target.tables['compiler']['name']} was not found"
            facts["how_to_compile"] = compiler.HOW_TO_COMPILE
            return facts
        done = compiler.compile_model(program, model, context.folder, self.timeout_s)
        (context.folder / f"{model.stem}_edgetpu.log").unlink(missing_ok=True)  # the same text again
        (context.folder / "compiler.log").write_text(done.log, encoding="utf-8")
        assert (context.folder / MODEL_EDGETPU).is_file()
        return {
            **facts,
            "compiled": True,
            "report_on_chip_bytes": done.on_chip_bytes,
            "report_off_chip_bytes": done.off_chip_bytes,
        }
