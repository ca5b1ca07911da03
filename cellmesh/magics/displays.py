"""Shows cellmesh's objects as widgets, where the extension is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.formatters import DisplayFormatter
from IPython.display import display

_MESH = ("cellmesh.controller.mesh", "Mesh")


class MagicDisplays:
    """Draws the objects of one shell; a widget's module is imported when it is first needed."""

    def __init__(self) -> None:
        self._renderers: dict[tuple[str, str], Callable[[Any], None]] = {
            ("cellmesh.controller.metrics", "Plot"): _show_plot,
            ("cellmesh.controller.inspect.inspection", "Inspection"): _show_inspection,
        }

    def register(self, formatter: DisplayFormatter) -> None:
        """Have a shell show cellmesh's objects as widgets."""
        for (module, name), show in self._renderers.items():
            formatter.ipython_display_formatter.for_type_by_name(module, name, show)
        formatter.formatters["text/html"].for_type_by_name(*_MESH, _draw_mesh)

    def unregister(self, formatter: DisplayFormatter) -> None:
        """Undo `register`."""
        own = dict.fromkeys(self._renderers, formatter.ipython_display_formatter)
        for (module, name), printers in {**own, _MESH: formatter.formatters["text/html"]}.items():
            printers.deferred_printers.pop((module, name), None)
            for kind in [
                kind
                for kind in printers.type_printers
                if (kind.__module__, kind.__name__) == (module, name)
            ]:
                printers.pop(kind)


def _draw_mesh(mesh: Any) -> str | None:
    """Draw the ranks at their coordinates with what each does; None if the mesh has ended."""
    from .render.tables import doing, mesh_table

    states = mesh.states() if mesh.alive else {}
    infos = sorted(mesh.report(), key=lambda info: info.rank) if mesh.alive else []
    words = [doing(info, states.get(info.rank)) for info in infos]
    return mesh_table(repr(mesh), mesh.dims, words)._repr_html_() if words else None


def _show_plot(plot: Any) -> None:
    from .widgets.plot.plot import LivePlot

    LivePlot(plot).view._ipython_display_()


def _show_inspection(inspection: Any) -> None:
    if inspection.ranks is not None:
        from .widgets.inspector.show import show_inspection

        show_inspection(inspection.ranks, inspection)._ipython_display_()
        return
    from .render.inspections import static_of

    static = static_of(inspection)
    display({"text/plain": static.text, "text/html": static.html}, raw=True)  # type: ignore[no-untyped-call]
