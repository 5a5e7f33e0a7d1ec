//! Encoded camera images to RGB, as Pillow's `convert("RGB")` has it: an alpha channel is dropped, grey is
//! repeated.

use std::{
    any::Any,
    io::Cursor,
    panic::{AssertUnwindSafe, catch_unwind},
};

use png::{ColorType, Transformations};
use zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};
use zune_jpeg::JpegDecoder;

use crate::{lerobot::frames::Pixels, surviving::words};

/// Largest decoded image accepted; a garbled header must not allocate the machine away.
const MAX_DECODED_BYTES: usize = 512 << 20;
/// Longest side accepted, which is JPEG's own: decoders hold rows besides the image, and a few bytes of a PNG
/// can claim a row as large as all of it.
const LONGEST_SIDE: usize = 65_535;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";

/// Height and width that an encoded image says it has.
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
    Some((height, width))
}

/// The image, or what is wrong with it.
pub fn decode(encoded: &[u8]) -> Result<Pixels, String> {
    let decoded = match encoded {
        _ if encoded.starts_with(PNG) => decode_png(encoded),
        _ if encoded.starts_with(JPEG) => decode_jpeg(encoded),
        _ => return Err("the image is neither PNG nor JPEG; re-export the data set".into()),
    };
    decoded.map_err(|e| format!("the image does not decode ({e}); record the frame again"))
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
        return Err(format!("a side has {side} pixels, and {LONGEST_SIDE} is the most"));
    }
    let fits = |bytes: &usize| (*bytes).max(3 * sides[0] * sides[1]) <= MAX_DECODED_BYTES;
    let bytes =
        bytes.filter(fits).ok_or_else(|| format!("it has more than {} MiB", MAX_DECODED_BYTES >> 20))?;
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
    fn garbage_is_refused_with_a_reason() {
        for bytes in [&b""[..], b"hello", b"\x89PNG\r\n\x1a\n truncated", b"\xff\xd8\xff truncated"] {
            let reason = decode(bytes).unwrap_err();
            assert!(reason.contains("the image"), "{reason}");
            assert_eq!(image_size(bytes), None);
        }
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
