//! Encoded images to RGB, as Pillow's `exif_transpose` and `convert("RGB")` have it: turned as Exif says, an
//! alpha channel is dropped, grey is repeated.

use std::{
    any::Any,
    io::Cursor,
    panic::{AssertUnwindSafe, catch_unwind},
};

use coxswain_video::LFS_POINTER;
use png::{ColorType, Transformations};
use zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};
use zune_jpeg::JpegDecoder;

use crate::{orientation::Orientation, pixels::Pixels, surviving::words};

/// Largest decoded image accepted; a garbled header must not allocate the machine away.
const MAX_DECODED_BYTES: usize = 512 << 20;
/// Longest side accepted, which is JPEG's own: decoders hold rows besides the image, and a few bytes of a PNG
/// can claim a row as large as all of it.
const LONGEST_SIDE: usize = 65_535;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";

/// Height and width that an encoded image says it has, turned as it is seen.
pub fn image_size(encoded: &[u8]) -> Option<(usize, usize)> {
    let (width, height) = match encoded {
        _ if encoded.starts_with(PNG) => {
            let mut decoder = png::Decoder::new(Cursor::new(encoded));
            let (width, height) = decoder.read_header_info().ok()?.size();
            (width as usize, height as usize)
        }
        _ if encoded.starts_with(JPEG) => jpeg_headers(encoded).ok()?.dimensions()?,
        _ => return None,
    };
    Some(orientation(encoded).size(height, width))
}

/// The image, or what is wrong with it.
pub fn decode(encoded: &[u8]) -> Result<Pixels, String> {
    let decoded = match encoded {
        _ if encoded.starts_with(PNG) => decode_png(encoded),
        _ if encoded.starts_with(JPEG) => decode_jpeg(encoded),
        [] => return Err("the image has no bytes; restore the file".into()),
        _ if encoded.starts_with(LFS_POINTER) => {
            return Err("the image is a Git LFS pointer; run `git lfs pull` in its directory".into());
        }
        _ if encoded.trim_ascii_start().starts_with(b"<") => {
            return Err("the image is a web page or an SVG; restore the file as PNG or JPEG".into());
        }
        _ => return Err(format!("the image is {}; convert it to PNG or JPEG", kind_of(encoded))),
    };
    let decoded = decoded
        .map_err(|e| format!("the image does not decode ({e}); restore the file, or record the frame again"));
    Ok(orientation(encoded).apply(decoded?))
}

/// What begins like this, if it is neither PNG nor JPEG.
fn kind_of(encoded: &[u8]) -> &'static str {
    match encoded {
        [b'G', b'I', b'F', b'8', ..] => "a GIF",
        [b'B', b'M', ..] => "a BMP",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "WebP",
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "a TIFF",
        _ => "neither PNG nor JPEG",
    }
}

/// What Exif says of an image.
fn orientation(encoded: &[u8]) -> Orientation {
    let exif = match encoded {
        _ if encoded.starts_with(PNG) => {
            PngChunks { rest: &encoded[PNG.len()..] }.find(|(kind, _)| kind == b"eXIf").map(|(_, exif)| exif)
        }
        _ => segments(encoded)
            .find(|(marker, body)| *marker == APP1 && body.starts_with(b"Exif\0\0"))
            .map(|(_, exif)| exif),
    };
    exif.map_or(Orientation::UPRIGHT, Orientation::of_exif)
}

/// The chunks of a PNG behind its signature: kind and body.
struct PngChunks<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for PngChunks<'a> {
    type Item = ([u8; 4], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (length, rest) = self.rest.split_first_chunk::<4>()?;
        let (kind, rest) = rest.split_first_chunk::<4>()?;
        let (body, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        self.rest = rest.get(4..).unwrap_or_default();
        Some((*kind, body))
    }
}

/// Markers of a JPEG: the end of the image, and what Exif is in.
const END: u8 = 0xd9;
const APP1: u8 = 0xe1;

/// The segments of a JPEG: marker and body. A scan's coded pixels are passed over. Ends behind the end of the
/// image, or where the bytes end.
fn segments(encoded: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = encoded.get(2..).unwrap_or_default();
    std::iter::from_fn(move || {
        // Between segments there may be bytes that fill up, and in coded pixels there are escaped ones.
        let at =
            rest.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xd0..=0xd7 | 0xff));
        let marker = rest[at? + 1];
        rest = &rest[at? + 2..];
        if marker == END {
            rest = &[];
            return Some((marker, rest));
        }
        let length = usize::from(u16::from_be_bytes(*rest.first_chunk()?));
        let body = rest.get(2..length)?;
        rest = &rest[length..];
        Some((marker, body))
    })
}

fn decode_png(encoded: &[u8]) -> Result<Pixels, String> {
    let limits = png::Limits { bytes: MAX_DECODED_BYTES };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(encoded), limits);
    // Palettes to their colours and bits to bytes. 16 bits are rounded below, which the decoder would cut
    // off.
    decoder.set_transformations(Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(|e| e.to_string())?;
    let (width, height) = reader.info().size();
    let mut bytes = room([width as usize, height as usize], reader.output_buffer_size())?;
    let frame = reader.next_frame(&mut bytes).map_err(|e| e.to_string())?;
    bytes.truncate(frame.buffer_size());
    if frame.bit_depth == png::BitDepth::Sixteen {
        let narrow = |sample: &[u8]| ((u32::from(sample[0]) << 8 | u32::from(sample[1])) + 128) / 257;
        bytes = bytes.chunks_exact(2).map(|sample| narrow(sample) as u8).collect();
    }
    let channels = match frame.color_type {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err("its palette is missing".into()),
    };
    Ok(Pixels { height: frame.height as usize, width: frame.width as usize, rgb: colours(bytes, channels) })
}

fn jpeg_headers(encoded: &[u8]) -> Result<JpegDecoder<ZCursor<&[u8]>>, String> {
    let options =
        DecoderOptions::default().set_strict_mode(false).set_max_width(usize::MAX).set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(encoded), options);
    decoder.decode_headers().map_err(|e| e.to_string())?;
    Ok(decoder)
}

fn decode_jpeg(encoded: &[u8]) -> Result<Pixels, String> {
    // The decoder makes grey of what is missing.
    if segments(encoded).all(|(marker, _)| marker != END) {
        return Err("it is truncated: the end of the image is missing".into());
    }
    let mut decoder = jpeg_headers(encoded)?;
    let (colours_are, channels) = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => (ColorSpace::Luma, 1),
        _ => (ColorSpace::RGB, 3),
    };
    decoder.set_options(decoder.options().jpeg_set_out_colorspace(colours_are));
    let (width, height) = decoder.dimensions().ok_or("no size")?;
    let mut bytes = room([width, height], decoder.output_buffer_size())?;
    // It panics over some damaged images.
    let decoded = catch_unwind(AssertUnwindSafe(|| decoder.decode_into(&mut bytes)));
    let panicked = |panic: Box<dyn Any + Send>| format!("its decoder panicked: {}", words(&*panic));
    decoded.map_err(panicked)?.map_err(|e| e.to_string())?;
    Ok(Pixels { height, width, rgb: colours(bytes, channels) })
}

/// Room for an image of these sides as its decoder puts it, which is not yet three bytes a pixel.
fn room(sides: [usize; 2], bytes: Option<usize>) -> Result<Vec<u8>, String> {
    if let Some(side) = sides.into_iter().find(|side| *side > LONGEST_SIDE) {
        return Err(format!("a side has {side} pixels; at most {LONGEST_SIDE} are supported"));
    }
    let fits = |bytes: &usize| (*bytes).max(3 * sides[0] * sides[1]) <= MAX_DECODED_BYTES;
    let bytes =
        bytes.filter(fits).ok_or_else(|| format!("its pixels exceed {} MiB", MAX_DECODED_BYTES >> 20))?;
    Ok(vec![0; bytes])
}

/// Red, green and blue of pixels of so many channels.
fn colours(bytes: Vec<u8>, channels: usize) -> Vec<u8> {
    match channels {
        3 => bytes,
        4 => bytes.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
        _ => bytes.chunks_exact(channels).flat_map(|pixel| [pixel[0]; 3]).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(color: ColorType, depth: png::BitDepth, pixels: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, 2, 1);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == ColorType::Indexed {
            encoder.set_palette(vec![9, 8, 7, 1, 2, 3]);
        }
        encoder.write_header().unwrap().write_image_data(pixels).unwrap();
        bytes
    }

    fn fixture(path: &str) -> Vec<u8> {
        std::fs::read(format!("{}/tests/fixtures/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    #[test]
    fn an_image_that_its_decoder_panics_over_is_refused() {
        let reason = decode(&fixture("hostile/panics.jpg")).unwrap_err();
        assert!(reason.contains("panicked"), "{reason}: the decoder takes it now, and this file can go");
    }

    #[test]
    fn a_jpeg_that_is_cut_off_is_refused_wherever_it_is_cut() {
        for name in ["baseline", "progressive", "grey"] {
            let whole = fixture(&format!("pictures/{name}.jpg"));
            assert!(decode(&whole).is_ok());
            assert!(decode(&[&whole[..], b"\0\0 behind its end"].concat()).is_ok());
            for end in (3..whole.len()).step_by(7).chain([whole.len() - 2, whole.len() - 1]) {
                let reason = decode(&whole[..end]).unwrap_err();
                assert!(reason.contains("truncated"), "{name}, {end} bytes: {reason}");
            }
        }
    }

    /// Exif that says 6: a quarter turn to the right.
    const SIDEWAYS: &[u8] = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";

    #[test]
    fn a_picture_is_rotated_as_exif_says() {
        let whole = fixture("pictures/baseline.jpg");
        let body = [b"Exif\0\0", SIDEWAYS].concat();
        let length = (body.len() as u16 + 2).to_be_bytes();
        let jpeg = [&whole[..2], &[0xff, APP1], &length, &body, &whole[2..]].concat();
        let mut png = Vec::new();
        let mut info = png::Info::with_size(2, 1);
        info.color_type = ColorType::Rgb;
        info.exif_metadata = Some(SIDEWAYS.into());
        let encoder = png::Encoder::with_info(&mut png, info).unwrap();
        encoder.write_header().unwrap().write_image_data(&[1, 2, 3, 4, 5, 6]).unwrap();
        for (rotated, stored) in [
            (jpeg, decode(&whole)),
            (png, decode(&encoded(ColorType::Rgb, png::BitDepth::Eight, &[1, 2, 3, 4, 5, 6]))),
        ] {
            let stored = stored.unwrap();
            let seen = decode(&rotated).unwrap();
            assert_eq!((seen.height, seen.width), (stored.width, stored.height));
            assert_eq!(image_size(&rotated), Some((seen.height, seen.width)));
            assert_eq!(seen, Orientation::RIGHT.apply(stored));
        }
    }

    #[test]
    fn garbage_is_refused_with_a_reason() {
        for bytes in [&b""[..], b"hello", b"\x89PNG\r\n\x1a\n truncated", b"\xff\xd8\xff truncated"] {
            let reason = decode(bytes).unwrap_err();
            assert!(reason.contains("the image"), "{reason}");
            assert_eq!(image_size(bytes), None);
        }
        let page = decode(b"\n<!DOCTYPE html>").unwrap_err();
        assert!(page.contains("a web page") && page.contains("restore the file"), "{page}");
    }

    #[test]
    fn every_kind_of_png_becomes_three_bytes_a_pixel() {
        use ColorType::{Grayscale, GrayscaleAlpha, Indexed, Rgb, Rgba};
        use png::BitDepth::{Eight, One, Sixteen};
        let cases: [(ColorType, png::BitDepth, &[u8], [u8; 6]); 8] = [
            (Rgb, Eight, &[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
            (Rgba, Eight, &[1, 2, 3, 0, 4, 5, 6, 255], [1, 2, 3, 4, 5, 6]),
            (Grayscale, Eight, &[7, 9], [7, 7, 7, 9, 9, 9]),
            (GrayscaleAlpha, Eight, &[7, 0, 9, 255], [7, 7, 7, 9, 9, 9]),
            (Grayscale, One, &[0b0100_0000], [0, 0, 0, 255, 255, 255]),
            (Indexed, Eight, &[1, 0], [1, 2, 3, 9, 8, 7]),
            // 0x00ff is nearer to 1 than to 0, and 0xff7e to 254 than to 255.
            (Grayscale, Sixteen, &[0x00, 0xff, 0xff, 0x7e], [1, 1, 1, 254, 254, 254]),
            (Rgb, Sixteen, &[0, 0, 1, 1, 255, 255, 0, 128, 0, 129, 2, 2], [0, 1, 255, 0, 1, 2]),
        ];
        for (color, depth, pixels, wanted) in cases {
            let bytes = encoded(color, depth, pixels);
            assert_eq!(image_size(&bytes), Some((1, 2)));
            let image = decode(&bytes).unwrap();
            assert_eq!((image.height, image.width), (1, 2));
            assert_eq!(image.rgb, wanted, "{color:?} {depth:?}");
        }
    }

    #[test]
    fn hostile_pictures_are_refused_or_decoded_within_what_their_size_takes() {
        let bytes = |count: u8| (0..count).map(|i| i.wrapping_mul(37)).collect::<Vec<_>>();
        // A row of 384 MiB, in 72 bytes.
        let row = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x08\0\0\x02\0\0\0\x01\x08\x02\0\0\x01\x56\x44\x0b\x26\
            \0\0\0\x0fIDAT\x78\x9c\x63\x62\x50\xf5\xca\x9f\xb2\x13\0\x05\x24\x02\x2e\xce\x1f\xcf\xaa\
            \0\0\0\0IEND\xaeB`\x82";
        assert!(decode(row).unwrap_err().contains("134217730 pixels"), "{:?}", decode(row).map(|_| ()));
        let png = [
            encoded(ColorType::Rgb, png::BitDepth::Eight, &bytes(2 * 3)),
            encoded(ColorType::GrayscaleAlpha, png::BitDepth::Sixteen, &bytes(2 * 4)),
            row.to_vec(),
        ];
        // Chunks of a PNG have a CRC each; those of the header and of what follows it are mended.
        let mend = |bytes: &mut [u8]| {
            let mut at = 8;
            while let Some(head) = bytes.get(at..at + 8) {
                let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
                let Some(chunk) = bytes.get(at + 4..(at + 8).saturating_add(length)) else { break };
                let crc = crc32fast::hash(chunk).to_be_bytes();
                let end = at + 8 + length;
                if let Some(place) = bytes.get_mut(end..end + 4) {
                    place.copy_from_slice(&crc);
                }
                at = end + 4;
            }
        };
        let held = 3 * MAX_DECODED_BYTES / 2;
        coxswain_fuzz::Target::new("png", png).mended_by(mend).holds(held, 64).check(|bytes| {
            let _ = image_size(bytes);
            drop(decode(bytes));
        });
        let jpeg = ["pictures/baseline", "pictures/progressive", "pictures/grey", "hostile/panics"]
            .map(|name| fixture(&format!("{name}.jpg")));
        coxswain_fuzz::Target::new("jpeg", jpeg).holds(held, 64).check(|bytes| {
            let _ = image_size(bytes);
            drop(decode(bytes));
        });
    }
}
