"""Procedural video: textured shapes that move, turn, bounce and occlude one another.

The training data of the tiny video diffusion transformer. Nothing is downloaded: every frame is
drawn from signed distance functions, on whichever device the generator lives. The class of a video
is the shape of its nearest (and largest) object; up to two smaller ones pass behind it.

Lengths are in pixels of a 64-pixel frame and scale with the shorter edge of the frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CLASS_NAMES: tuple[str, ...] = ("disc", "square", "triangle", "ring", "cross", "star")
OBJECTS = 3  # the last one is the nearest: it names the class of the video
WAVES = 3  # plane waves that make up the background
REFERENCE_EDGE = 64.0
TEXTURES = ("solid", "stripes", "checker")


@dataclass(frozen=True)
class Scene:
    """Everything that is random in a batch of videos; `render` draws it without further chance.

    B videos, K objects (far to near), W background waves; float32 unless said otherwise.
    """

    kind: Tensor  # [B, K] int64, index into CLASS_NAMES
    present: Tensor  # [B, K] 1 or 0
    radius: Tensor  # [B, K] pixels of a 64-pixel frame
    start: Tensor  # [B, K, 2] first centre (x, y) as a fraction of the frame
    speed: Tensor  # [B, K, 2] pixels of a 64-pixel frame, per frame
    angle: Tensor  # [B, K] radians in the first frame
    spin: Tensor  # [B, K] radians per frame
    texture: Tensor  # [B, K] int64, index into TEXTURES
    pitch: Tensor  # [B, K] texture periods across the radius
    colours: Tensor  # [B, K, 2, 3] RGB in [0, 1]
    wave: Tensor  # [B, W, 2] background wave vector, radians per pixel of a 64-pixel frame
    phase: Tensor  # [B, W] radians
    drift: Tensor  # [B, W] radians per frame
    backdrop: Tensor  # [B, 2, 3] RGB in [0, 1]

    @property
    def label(self) -> Tensor:
        """Class of every video: int64 [B]."""
        return self.kind[:, -1]


def signed_distance(kind: int, x: Tensor, y: Tensor) -> Tensor:
    """Distance to the outline of a unit shape, negative inside (exact near straight edges).

    Args:
        kind: index into CLASS_NAMES.
        x, y: coordinates in units of the shape's radius, any broadcastable shapes.
    """
    name = CLASS_NAMES[kind]
    if name == "disc":
        return torch.hypot(x, y) - 1.0
    if name == "ring":
        return (torch.hypot(x, y) - 0.75).abs() - 0.27
    if name == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.85
    if name == "cross":
        wide = torch.maximum(x.abs() - 1.05, y.abs() - 0.34)
        return torch.minimum(wide, torch.maximum(x.abs() - 0.34, y.abs() - 1.05))
    if name == "triangle":
        return _half_planes(x, y, 3)[0] - 0.6
    # A five-pointed star: at most one of the five edge lines of its inner pentagon is crossed.
    return _half_planes(x, y, 5)[1] - 1.2 * math.cos(0.4 * math.pi)


def _half_planes(x: Tensor, y: Tensor, edges: int) -> tuple[Tensor, Tensor]:
    """Largest and second largest distance along the normals of a regular polygon."""
    first = torch.full_like(x + y, -torch.inf)
    second = first
    for edge in range(edges):
        turn = math.pi / 2 + 2 * math.pi * edge / edges
        along = x * math.cos(turn) + y * math.sin(turn)
        second = torch.maximum(second, torch.minimum(first, along))
        first = torch.maximum(first, along)
    return first, second


def random_scene(batch: int, generator: torch.Generator, labels: Tensor | None = None) -> Scene:
    """Draw the random part of a batch of videos on the generator's device.

    Args:
        batch: number of videos.
        generator: source of all randomness; equal seeds on equal devices give equal scenes.
        labels: int64 [batch], the wanted classes; random when None.
    """
    device = generator.device

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        unit = torch.rand((batch, *shape), generator=generator, device=device)
        return low + (high - low) * unit

    def choice(count: int, *shape: int) -> Tensor:
        return torch.randint(count, (batch, *shape), generator=generator, device=device)

    kind = choice(len(CLASS_NAMES), OBJECTS)
    if labels is not None:
        kind[:, -1] = labels.to(device)
    present = (uniform(OBJECTS) < 0.6).float()
    present[:, -1] = 1.0
    radius = uniform(OBJECTS, low=5.0, high=9.0)
    radius[:, -1] = uniform(low=12.0, high=17.0)
    heading = uniform(OBJECTS, high=2 * math.pi)
    pace = uniform(OBJECTS, low=0.6, high=2.6)
    bright = hsv_to_rgb(uniform(OBJECTS, 2), uniform(OBJECTS, 2, low=0.55, high=1.0),
                        uniform(OBJECTS, 2, low=0.7, high=1.0))  # fmt: skip
    # The second texture colour is pale: it differs from the first and from the dim background.
    bright[:, :, 1] = 0.65 + 0.35 * bright[:, :, 1]
    direction = uniform(WAVES, high=2 * math.pi)
    number = uniform(WAVES, low=2 * math.pi / 80, high=2 * math.pi / 28)
    dim = hsv_to_rgb(uniform(2), uniform(2, low=0.1, high=0.6), uniform(2, low=0.08, high=0.4))
    return Scene(
        kind=kind,
        present=present,
        radius=radius,
        start=uniform(OBJECTS, 2),
        speed=pace[..., None] * torch.stack([heading.cos(), heading.sin()], -1),
        angle=uniform(OBJECTS, high=2 * math.pi),
        spin=uniform(OBJECTS, low=-0.12, high=0.12),
        texture=choice(len(TEXTURES), OBJECTS),
        pitch=uniform(OBJECTS, low=1.0, high=1.6),
        colours=bright,
        wave=number[..., None] * torch.stack([direction.cos(), direction.sin()], -1),
        phase=uniform(WAVES, high=2 * math.pi),
        drift=uniform(WAVES, low=-0.15, high=0.15),
        backdrop=dim,
    )


def hsv_to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Colours from hue, saturation and value in [0, 1], each [...]: RGB [..., 3] in [0, 1]."""
    sector = hue.new_tensor([5.0, 3.0, 1.0]) + 6.0 * hue[..., None]
    k = torch.remainder(sector, 6.0)
    return value[..., None] * (1 - saturation[..., None] * torch.minimum(k, 4 - k).clamp(0, 1))


def render(scene: Scene, frames: int = 16, height: int = 64, width: int = 64) -> Tensor:
    """Draw a scene.

    Returns:
        float32 [B, frames, height, width, 3] in [0, 1], on the scene's device.
    """
    device = scene.radius.device
    scale = min(height, width) / REFERENCE_EDGE
    time = torch.arange(frames, device=device, dtype=torch.float32)
    y = torch.arange(height, device=device, dtype=torch.float32).view(-1, 1) + 0.5
    x = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    video = _background(scene, time, y / scale, x / scale)
    for k in range(scene.kind.shape[1]):
        centre = _centres(scene, k, time, height, width, scale)
        local_x, local_y = _local(
            scene, k, time, x - centre[..., :1, None], y - centre[..., 1:, None]
        )
        radius = (scene.radius[:, k] * scale).view(-1, 1, 1, 1)
        distance = _distance(scene.kind[:, k], local_x / radius, local_y / radius)
        # One pixel of linear coverage around the outline anti-aliases it.
        cover = (0.5 - distance * radius).clamp(0, 1) * scene.present[:, k].view(-1, 1, 1, 1)
        mix = _texture(scene, k, local_x / radius, local_y / radius)[..., None]
        light, dark = scene.colours[:, k].view(-1, 2, 1, 1, 1, 3).unbind(1)
        video = torch.lerp(video, torch.lerp(dark, light, mix), cover[..., None])
    return video


def make_videos(
    batch: int,
    *,
    frames: int = 16,
    height: int = 64,
    width: int = 64,
    generator: torch.Generator | None = None,
    seed: int = 0,
    labels: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A batch of labelled videos.

    Args:
        batch: number of videos.
        frames, height, width: size in frames and pixels.
        generator: source of randomness and choice of device; a CPU generator from `seed` when None.
        seed: used when no generator is given.
        labels: int64 [batch], the wanted classes; random when None.

    Returns:
        Video float32 [batch, frames, height, width, 3] in [0, 1] and class int64 [batch].
    """
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    scene = random_scene(batch, generator, labels)
    return render(scene, frames, height, width), scene.label


def _background(scene: Scene, time: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Smooth drifting field between two dim colours: [B, F, H, W, 3]."""
    field = torch.zeros((), device=time.device)
    for w in range(scene.wave.shape[1]):
        kx, ky = scene.wave[:, w].view(-1, 2, 1, 1, 1).unbind(1)
        turn = scene.phase[:, w, None] + scene.drift[:, w, None] * time
        field = field + torch.cos(kx * x + ky * y + turn[..., None, None])
    mix = (0.5 + field / (2 * scene.wave.shape[1]))[..., None]
    low, high = scene.backdrop.view(-1, 2, 1, 1, 1, 3).unbind(1)
    return torch.lerp(low, high, mix)


def _centres(scene: Scene, k: int, time: Tensor, height: int, width: int, scale: float) -> Tensor:
    """Centre of object k in every frame, bouncing off the edges: [B, F, 2] pixels (x, y)."""
    edge = torch.tensor([width, height], device=time.device, dtype=torch.float32)
    margin = 0.7 * scene.radius[:, k].view(-1, 1, 1) * scale
    room = edge - 2 * margin
    free = scene.start[:, None, k] * room + scene.speed[:, None, k] * scale * time[:, None]
    # A reflection at both ends is a triangle wave of twice the free length.
    return margin + room - (torch.remainder(free, 2 * room) - room).abs()


def _local(scene: Scene, k: int, time: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Pixel offsets turned into the frame of object k, so that its texture turns with it."""
    turn = (scene.angle[:, k, None] + scene.spin[:, k, None] * time)[..., None, None]
    return x * turn.cos() + y * turn.sin(), y * turn.cos() - x * turn.sin()


def _distance(kind: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance with another shape for every video of the batch: x, y [B, F, H, W]."""
    distance = torch.zeros_like(x)
    for index in range(len(CLASS_NAMES)):
        chosen = (kind == index).view(-1, 1, 1, 1)
        distance = torch.where(chosen, signed_distance(index, x, y), distance)
    return distance


def _texture(scene: Scene, k: int, x: Tensor, y: Tensor) -> Tensor:
    """Share of the light colour in [0, 1], with soft transitions: [B, F, H, W]."""
    turn = (math.pi * scene.pitch[:, k]).view(-1, 1, 1, 1)
    kind = scene.texture[:, k].view(-1, 1, 1, 1)
    stripes = torch.sin(turn * x)
    checker = stripes * torch.sin(turn * y)
    soft = torch.where(kind == 1, 4 * stripes, 8 * checker)
    return torch.where(kind == 0, 1.0, 0.5 + 0.5 * soft.clamp(-1, 1))
