//! AV1 by rav1d, the Rust port of dav1d.
//!
//! ```text
//! thread   a decoder on a thread of its own: all calls of rav1d
//! panics   a panic of such a thread costs the thread, and not the process
//! dav1d    rav1d's C interface
//! ```

mod dav1d;
mod panics;
#[cfg(test)]
mod tests;
mod thread;

use self::dav1d::OwnedPicture;
use self::thread::{DecoderThread, Order};
use crate::boxes::Cursor;
use crate::error::{Fault, container, picture, refused};
use crate::limits::MAX_UNITS_IN_SAMPLE;
use crate::picture::{Picture, Show};

/// The OBUs of `av1C`; refuses what the box says is not decoded.
pub(crate) fn header(av1c: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut cursor = Cursor::new(av1c);
    let [marker, _, flags, _] = cursor.array::<4>()?;
    if marker != 0x81 {
        return Err(container("`av1C` of an unknown version"));
    }
    if flags & 0x40 != 0 {
        return Err(refused(if flags & 0x20 != 0 { "12-bit AV1" } else { "10-bit AV1" }));
    }
    if flags & 0x10 != 0 {
        return Err(refused("monochrome AV1"));
    }
    Ok(cursor.rest().to_vec())
}

/// A decoder: a sample in, its picture out.
pub(crate) struct Av1 {
    /// The picture that was shown last. It goes back to the decoder's thread with the next order; it stands
    /// before the decoder here, so that it is dropped before that is closed.
    shown: Option<OwnedPicture>,
    decoder: DecoderThread,
    /// OBUs that go before the next sample.
    header: Vec<u8>,
    /// Whether the next sample has nothing to do with the one before.
    restart: bool,
}

impl Av1 {
    /// A decoder for frames of at most `pixels`.
    pub fn new(pixels: usize) -> Result<Self, Fault> {
        let decoder = DecoderThread::open(u32::try_from(pixels).unwrap_or(u32::MAX))?;
        Ok(Self { shown: None, decoder, header: Vec::new(), restart: false })
    }

    /// Forgets what came before; `header` holds the sequence header, which keyframes usually repeat.
    pub fn restart(&mut self, header: &[u8]) {
        self.restart = true;
        self.header = header.to_vec();
    }

    /// Decodes one sample; without `show` nobody wants its picture, and a later one says what was wrong.
    pub fn decode(&mut self, sample: &[u8], show: Option<Show<'_>>) -> Result<(), Fault> {
        let mut unit = self.decoder.memory();
        unit.append(&mut self.header);
        unit.extend_from_slice(sample);
        count_frames(&unit)?;
        let (back, restart) = (self.shown.take(), std::mem::take(&mut self.restart));
        let order = Order { back, restart, unit, show: show.is_some() };
        let decoded = self.decoder.decode(order)?;
        match decoded.zip(show) {
            Some((decoded, show)) => hand_over(self.shown.insert(decoded), show),
            None => Ok(()),
        }
    }
}

fn hand_over(decoded: &OwnedPicture, show: Show<'_>) -> Result<(), Fault> {
    let layout = decoded.layout().ok_or_else(|| refused("monochrome AV1"))?;
    if decoded.bits() != 8 {
        return Err(refused(format!("{}-bit AV1", decoded.bits())));
    }
    let whole = decoded.colour().zip(decoded.planes(layout));
    let (colour, planes) = whole.ok_or_else(|| picture("a picture without planes"))?;
    let (width, height) = decoded.size();
    show(&Picture { width, height, layout, colour, planes });
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
