"""The route viewer: masks of any size, drawn in the browser from bits and coded scores."""

from workbench.widgets.route_viewer.widget import RouteViewer

__all__ = ["RouteViewer"]
