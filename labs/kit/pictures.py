"""What the labs' pictures share: colours of ranks, a figure that is saved, a matrix cut up."""

from contextlib import contextmanager
from pathlib import Path

from labs.kit.cli import UsageError

# Okabe and Ito's colours, which colour-blind readers can tell apart
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW = "#56B4E9", "#D55E00", "#F0E442"
GREY, PALE = "#999999", "#BBBBBB"
RANKS = BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY  # the colour of each rank


def check_picture(path):
    """Raise UsageError for a file that is no kind of picture; None is fine."""
    if path:
        from matplotlib.figure import Figure

        kinds = Figure().canvas.get_supported_filetypes()
        if Path(path).suffix[1:] not in kinds:
            raise UsageError(f"cannot draw {path}: use a name that ends in .{', .'.join(kinds)}")


@contextmanager
def picture(path, mosaic, size, **options):
    """{name: axis} of a new figure, which is saved to path at the end.

    mosaic: rows of names, one for each axis ([["left", "right"]]); size: width, height in inches;
    options: of pyplot.subplot_mosaic. Each axis has its figure as axis.figure.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic(mosaic, figsize=size, **options)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_matrix(axis, x, y, height, width, ranks, dim):
    """A matrix with its top left corner at (x, y), in the colours of the ranks that hold it.

    dim 0: its rows are cut over the ranks; 1: its columns are; None: grey, each rank holds all.
    """
    from matplotlib.patches import Rectangle

    if dim is None:
        look = {"facecolor": "0.8", "edgecolor": "white"}
        axis.add_patch(Rectangle((x, y - height), width, height, **look))
        return
    size, start = (height, width)[dim], 0
    for rank in range(ranks):
        share = size // ranks + (rank < size % ranks)  # the first ranks hold one more
        corner = (x + start, y - height) if dim else (x, y - start - share)
        extent = (share, height) if dim else (width, share)
        look = {"facecolor": RANKS[rank], "edgecolor": "white", "lw": 2}
        axis.add_patch(Rectangle(corner, *extent, **look))
        start += share
