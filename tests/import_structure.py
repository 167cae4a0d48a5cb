"""Units and import edges directly below a package: `python -m tests.import_structure [imagemill]`.

A unit is a module or package directly below the given one; an edge is an import between two units, however many modules it joins.
"""

import sys

import grimp


def import_structure(package: str = "imagemill") -> tuple[set[str], set[tuple[str, str]]]:
    """Return the units below a package and the edges (importer, imported) between them."""
    graph = grimp.build_graph(package)
    units = set(graph.find_children(package))
    edges = {
        (importer, imported)
        for importer in units
        for imported in units - {importer}
        if graph.direct_import_exists(importer=importer, imported=imported, as_packages=True)
    }
    return units, edges


if __name__ == "__main__":
    package = sys.argv[1] if len(sys.argv) > 1 else "imagemill"
    units, edges = import_structure(package)
    print(f"{package}: {len(units)} units, {len(edges)} import edges")
    for importer, imported in sorted(edges):
        print(f"  {importer} -> {imported}")
