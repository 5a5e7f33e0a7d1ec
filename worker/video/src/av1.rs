//! AV1 by rav1d, the Rust port of dav1d.

use re_rav1d::dav1d::pixel::YUVRange;
use re_rav1d::dav1d::{Decoder, Error, Picture as Decoded, PixelLayout, PlanarImageComponent, Settings};

use crate::boxes::Cursor;
use crate::error::{Fault, container, picture, refused};
use crate::limits::MAX_UNITS_IN_SAMPLE;
use crate::picture::{Colour, Layout, Picture, Plane, Show};

/// The OBUs of `av1C`; refuses what the box says is not decoded.
pub(crate) fn header(av1c: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut cursor = Cursor::new(av1c);
    let [marker, _, flags, _] = cursor.array::<4>()?;
    if marker != 0x81 {
        return Err(container("`av1C` of an unknown version"));
    }
    if flags & 0x40 != 0 {
        return Err(refused(if flags & 0x20 != 0 {
            "AV1 with 12 bits a sample"
        } else {
            "AV1 with 10 bits a sample"
        }));
    }
    if flags & 0x10 != 0 {
        return Err(refused("monochrome AV1"));
    }
    Ok(cursor.rest().to_vec())
}

/// One dav1d with one thread: a sample in, its picture out.
///
/// re_rav1d 0.1.3 loses 64 bytes with each picture it gives, and with each time it says that it has none (an
/// empty list of metadata that its C interface never frees). So it is asked once for each sample and not in
/// between.
pub(crate) struct Av1 {
    decoder: Decoder,
    /// OBUs that go before the next sample.
    header: Vec<u8>,
}

impl Av1 {
    /// A decoder for frames of at most `pixels`.
    pub fn new(pixels: usize) -> Result<Self, Fault> {
        let mut settings = Settings::new();
        settings.set_n_threads(1);
        settings.set_max_frame_delay(1);
        settings.set_all_layers(false);
        settings.set_frame_size_limit(u32::try_from(pixels).unwrap_or(u32::MAX));
        let decoder =
            Decoder::with_settings(&settings).map_err(|error| picture(format!("dav1d: {error}")))?;
        Ok(Self { decoder, header: Vec::new() })
    }

    /// Forgets what came before; `header` holds the sequence header, which keyframes usually repeat.
    pub fn restart(&mut self, header: &[u8]) {
        self.decoder.flush();
        self.header = header.to_vec();
    }

    pub fn decode(&mut self, sample: &[u8], show: Option<Show<'_>>) -> Result<(), Fault> {
        let mut unit = std::mem::take(&mut self.header);
        unit.extend_from_slice(sample);
        self.send(unit)?;
        match self.decoder.get_picture() {
            Ok(decoded) => show.map_or(Ok(()), |show| hand_over(&decoded, show)),
            Err(Error::Again) => Err(picture("a sample without a shown frame")),
            Err(error) => Err(fault(error)),
        }
    }

    /// What stands behind a sample's picture is taken in when the next one comes.
    fn send(&mut self, unit: Vec<u8>) -> Result<(), Fault> {
        count_frames(&unit)?;
        match self.decoder.send_data(unit, None, None, None) {
            Err(Error::Again) => match self.decoder.get_picture() {
                Ok(_) => Err(picture("two shown frames in one sample")),
                Err(Error::Again) => self.decoder.send_pending_data().map_err(fault),
                Err(error) => Err(fault(error)),
            },
            sent => sent.map_err(fault),
        }
    }
}

fn fault(error: Error) -> Fault {
    picture(format!("dav1d: {error}"))
}

fn hand_over(decoded: &Decoded, show: Show<'_>) -> Result<(), Fault> {
    let layout = match decoded.pixel_layout() {
        PixelLayout::I420 => Layout::Yuv420,
        PixelLayout::I422 => Layout::Yuv422,
        PixelLayout::I444 => Layout::Yuv444,
        PixelLayout::I400 => return Err(refused("monochrome AV1")),
    };
    if decoded.bit_depth() != 8 {
        return Err(refused(format!("AV1 with {} bits a sample", decoded.bit_depth())));
    }
    // The names are the code points' (BT.470BG stands for both 5 and 6). dav1d's word is the sequence
    // header's, which overrules the container's, as in FFmpeg.
    let colour = Colour {
        matrix: decoded.matrix_coefficients() as u16,
        full_range: decoded.color_range() == YUVRange::Full,
    };
    let planes = [PlanarImageComponent::Y, PlanarImageComponent::U, PlanarImageComponent::V];
    let planes = planes.map(|plane| (decoded.plane(plane), decoded.stride(plane) as usize));
    show(&Picture {
        width: decoded.width() as usize,
        height: decoded.height() as usize,
        layout,
        colour,
        planes: [0, 1, 2].map(|n: usize| Plane { samples: planes[n].0.as_ref(), stride: planes[n].1 }),
    });
    Ok(())
}

/// Walks the OBUs and counts frames, so that a small sample cannot hold hours of decoding.
fn count_frames(sample: &[u8]) -> Result<(), Fault> {
    let (mut rest, mut frames) = (sample, 0);
    while let Some((&head, mut after)) = rest.split_first() {
        let (kind, extended, sized) = ((head >> 3) & 15, head & 4 != 0, head & 2 != 0);
        if extended {
            after = after.get(1..).ok_or_else(|| picture("an OBU ends early"))?;
        }
        let (size, body) = if sized { leb128(after)? } else { (after.len(), after) };
        rest = body.get(size..).ok_or_else(|| picture("an OBU ends early"))?;
        // Frame header, frame.
        frames += usize::from(matches!(kind, 3 | 6));
        if frames > MAX_UNITS_IN_SAMPLE {
            return Err(picture(format!("more than {MAX_UNITS_IN_SAMPLE} frames in one sample")));
        }
    }
    Ok(())
}

fn leb128(bytes: &[u8]) -> Result<(usize, &[u8]), Fault> {
    let mut value = 0_u64;
    for (n, &byte) in bytes.iter().take(8).enumerate() {
        value |= u64::from(byte & 127) << (7 * n);
        if byte & 128 == 0 {
            let size = usize::try_from(value).map_err(|_| picture("an OBU larger than memory"))?;
            return Ok((size, &bytes[n + 1..]));
        }
    }
    Err(picture("an OBU without a size"))
}
