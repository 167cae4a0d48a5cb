"""ICC profiles, built from the specification alone (ICC.1:2001-04 and ICC.1:2022), for tests of colours."""

import io
import struct

from PIL import Image, ImageCms

from tests.helpers.images import encoded

D50 = (0.9642, 1.0, 0.8249)

# Colorants adapted to D50, as the vendors' own profiles contain them.
DISPLAY_P3 = (
    (0.51512146, 0.24119568, -0.00105286),
    (0.29197693, 0.69224548, 0.04188538),
    (0.15710449, 0.06657410, 0.78407288),
)
ADOBE_RGB = (
    (0.60974121, 0.31111145, 0.01947021),
    (0.20527649, 0.62567139, 0.06086731),
    (0.14918518, 0.06321716, 0.74456787),
)
PROPHOTO = ((0.79766846, 0.28803000, 0.0), (0.13517761, 0.71188354, 0.0), (0.03134155, 0.00009155, 0.82490540))


def fixed(*values):
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def assembled(space, tags, *, device=b"mntr", pcs=b"XYZ ", version=0x02400000):
    """Return a profile with these tags."""
    table, body, offset = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, value in tags.items():
        table += struct.pack(">4sII", name, offset + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    head = struct.pack(">I4sI4s4s4s", offset + len(body), b"\0" * 4, version, device, space, pcs)
    return head + bytes(12) + b"acsp" + bytes(28) + fixed(*D50) + bytes(48) + table + body


def description(text):
    data = text.encode() + b"\0"
    return b"desc" + bytes(4) + struct.pack(">I", len(data)) + data + bytes(78)


def xyz(*values):
    return b"XYZ " + bytes(4) + fixed(*values)


def gamma(value):
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(value * 256))


SRGB_CURVE = b"para" + bytes(4) + struct.pack(">HH", 3, 0) + fixed(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def rgb_profile(name, colorants, curve, **head):
    """Return an RGB display profile: three colorants and one curve."""
    tags = {b"desc": description(name), b"wtpt": xyz(*D50)}
    tags |= {tag: xyz(*values) for tag, values in zip((b"rXYZ", b"gXYZ", b"bXYZ"), colorants, strict=True)}
    return assembled(b"RGB ", tags | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve), **head)


def grey_profile(power, **head):
    tags = {b"desc": description(f"Grey gamma {power}"), b"wtpt": xyz(*D50), b"kTRC": gamma(power)}
    return assembled(b"GRAY", tags, **head)


def cmyk_profile():
    """Return a printer profile: one 2 x 2 x 2 x 2 table from inks to Lab, whose solid inks are duller than a screen's."""
    lab = []
    for n in range(16):
        inks = [(n >> bit) & 1 for bit in (3, 2, 1, 0)]
        light = 255 * 0.96 * (1 - 0.35 * inks[0]) * (1 - 0.45 * inks[1]) * (1 - 0.1 * inks[2]) * (1 - 0.85 * inks[3])
        lab += [
            round(light),
            128 + 50 * (inks[1] - inks[0]) * (1 - inks[3]),
            128 + 60 * (inks[2] - inks[0]) * (1 - inks[3]),
        ]
    curve = bytes(range(256))
    table = (
        b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + 4 * curve + bytes(lab) + 3 * curve
    )
    tags = {b"desc": description("Test inks"), b"wtpt": xyz(*D50), b"A2B0": table, b"A2B1": table}
    return assembled(b"CMYK", tags, device=b"prtr", pcs=b"Lab ")


P3 = rgb_profile("Display P3", DISPLAY_P3, SRGB_CURVE)
ADOBE = rgb_profile("Adobe RGB (1998)", ADOBE_RGB, gamma(2.19921875))
ROMM = rgb_profile("ProPhoto RGB", PROPHOTO, gamma(1.8))
WIDE = {"P3": P3, "Adobe RGB": ADOBE, "ProPhoto": ROMM}
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def converted(image, profile, mode="RGB"):
    """Convert as a colour-managed viewer does; the reference for every test of pixels."""
    source, target = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
    flags = ImageCms.Flags.BLACKPOINTCOMPENSATION
    return ImageCms.profileToProfile(image, source, target, ImageCms.Intent.RELATIVE_COLORIMETRIC, mode, flags=flags)


def in_space(image, profile):
    """Return an sRGB picture as a camera stores it in the space of this profile."""
    target, source = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
    return ImageCms.profileToProfile(image, source, target, ImageCms.Intent.RELATIVE_COLORIMETRIC, "RGB")


def over_white(image):
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image.convert("RGB"), mask=image.getchannel("A"))
    return canvas


def avif_with_nclx(image, primaries, transfer, **options):
    """Return an AVIF whose nclx box names other code points than those that Pillow writes."""
    data = encoded(image, "AVIF", **options)
    at = data.index(b"nclx")
    return data[: at + 4] + struct.pack(">HH", primaries, transfer) + data[at + 8 :]
