"""Draw the imports between the packages into docs/architecture.md: `python docs/draw_architecture.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- begin: python docs/draw_architecture.py -->"
END = "<!-- end -->"
Graph = dict[str, set[str]]


def imported(path: Path) -> set[str]:
    """Return the full names that a file imports anywhere, late imports included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def node_of(name: str) -> str | None:
    """Return the package of an imported name, or None for a file right below compress/ and for another library."""
    parts = name.split(".")
    if parts[0] == "deploy":
        return "deploy.contract" if parts[1:2] == ["contract"] else "deploy"
    if parts[0] == "darwinn":
        return "darwinn"
    if parts[0] != "compress" or len(parts) == 1:
        return None
    return parts[1] if (ROOT / "compress" / parts[1]).is_dir() else None


def graph() -> Graph:
    """Return the packages that each package imports."""
    edges: Graph = {}
    for path in sorted(
        [*(ROOT / "compress").rglob("*.py"), *(ROOT / "darwinn").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")]
    ):
        node = node_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if node is None or path.name == "__main__.py":
            continue
        targets = {node_of(name) for name in imported(path)}
        edges.setdefault(node, set()).update(target for target in targets if target and target != node)
    for leaf in set().union(*edges.values()) - edges.keys():
        edges[leaf] = set()
    return edges


def reachable(edges: Graph, start: str) -> set[str]:
    """Return all nodes that a node imports, directly or through others."""
    nodes: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += edges[node]
    return nodes


def reduced(edges: Graph) -> Graph:
    """Return the edges without those that a longer path implies."""
    result = {}
    for node, targets in edges.items():
        implied = set().union(*(reachable(edges, target) for target in targets))
        result[node] = targets - implied
    return result


def picture() -> str:
    """Return the graph as Mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    for node, targets in sorted(reduced(graph()).items()):
        lines += [f"    {node} --> {target}" for target in sorted(targets)]
    return "\n".join([*lines, "```"])


def purposes() -> str:
    """Return a table of the packages, with the first paragraph of each docstring."""
    lines = ["| package | purpose |", "|---|---|"]
    packages = [*sorted((ROOT / "compress").glob("*/__init__.py")), ROOT / "darwinn" / "__init__.py"]
    packages += sorted((ROOT / "deploy").glob("*/__init__.py"))
    for path in packages:
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
        lines.append(f"| `{path.parent.relative_to(ROOT).as_posix()}` | {' '.join(summary.split())} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with the current graph and table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{picture()}\n\n{purposes()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
