//! One open decoder of either codec: samples in, pictures out, nothing else known.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::av1::Av1;
use crate::codec::Stream;
use crate::error::{Fault, picture};
use crate::h264::H264;
use crate::index::VideoIndex;
use crate::picture::{Picture, Show};

/// A decoder of rav1d or rusty_h264, for frames of one size.
pub(crate) enum Decoder {
    Av1(Av1),
    H264(std::boxed::Box<H264>),
}

impl Decoder {
    pub fn new(index: &VideoIndex) -> Result<Self, Fault> {
        guarded(|| match &index.stream {
            Stream::Av1 { .. } => Av1::new(index.width * index.height).map(Self::Av1),
            Stream::H264(_) => Ok(Self::H264(std::boxed::Box::default())),
        })
    }

    /// Forgets what came before; the next sample is a keyframe of this stream.
    pub fn restart(&mut self, stream: &Stream) -> Result<(), Fault> {
        guarded(|| match (self, stream) {
            (Self::Av1(decoder), Stream::Av1 { header }) => {
                decoder.restart(header);
                Ok(())
            }
            (Self::H264(decoder), Stream::H264(sets)) => decoder.restart(sets),
            _ => Err(picture("a decoder of the other codec")),
        })
    }

    /// Decodes one sample. With `show` its picture is handed over; without, a picture no other one refers to
    /// may be skipped, and `false` says that it was.
    pub fn decode(
        &mut self,
        sample: &[u8],
        index: &VideoIndex,
        show: Option<Show<'_>>,
    ) -> Result<bool, Fault> {
        let checked = |picture: &Picture<'_>, show: Show<'_>| -> Result<(), Fault> {
            let (width, height) = (picture.width, picture.height);
            if (width, height) != (index.width, index.height) || !picture.is_whole() {
                let (w, h) = (index.width, index.height);
                return Err(self::picture(format!(
                    "it is {width} x {height} pixels, but the track says {w} x {h}"
                )));
            }
            if picture.colour.matrix == 0 {
                return Err(crate::error::refused("a video that stores RGB (matrix 0)"));
            }
            show(picture);
            Ok(())
        };
        guarded(|| {
            let mut fault = Ok(());
            let mut hand_over = show.map(|show| |picture: &Picture<'_>| fault = checked(picture, show));
            let show = hand_over.as_mut().map(|f| f as Show<'_>);
            let decoded = match self {
                Self::Av1(decoder) => decoder.decode(sample, show).map(|()| true),
                Self::H264(decoder) => decoder.decode(sample, index.colour, show),
            }?;
            fault.map(|()| decoded)
        })
    }
}

/// A decoder that panics has met a file it should have refused: an error like any other. Its state is not
/// used again. rusty_h264 panics here; rav1d on a thread of its own, which is given up (`av1::panics`).
fn guarded<T>(call: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(picture("the decoder panicked on it")))
}
