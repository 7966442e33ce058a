"""Build hook: generates `slotwire.v1` for wheels and editable installs, and puts the contract into the sdist."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ContractHook(BuildHookInterface[Any]):
    """The contract is `protos/` beside this file in an sdist, and the repository's own elsewhere."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before each build. Raises RuntimeError where the contract does not compile."""
        root = Path(self.root)
        packed = root / "protos"
        protos = packed if packed.is_dir() else root.parents[1] / "protos"
        if self.target_name == "sdist":
            build_data["force_include"][str(protos)] = "protos"
            return
        # A build backend does not have the project on its path, so the module is run by its file name.
        generate = runpy.run_path(str(root / "codegen.py"))["generate"]
        with tempfile.TemporaryDirectory(dir=root) as fresh:
            generate(protos, Path(fresh))
            # Swapped in whole: a contract that does not compile leaves an editable install as it was.
            shutil.rmtree(root / "slotwire", ignore_errors=True)
            Path(fresh, "slotwire").rename(root / "slotwire")
        build_data["artifacts"].append("/slotwire/")
