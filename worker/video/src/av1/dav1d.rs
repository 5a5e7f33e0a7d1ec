//! rav1d by its C interface, on one thread: units of AV1 in, pictures out. The unsafe code of this crate, but
//! for one call of `rgb`. A panic of any function here ends the process, unless `panics` is asked not to.
//!
//! Not by the crate's own Rust interface, which loses 64 bytes for good with each picture that it gives back:
//! in the place of one that is returned, rav1d leaves an empty one that owns an empty list of metadata, and
//! nothing frees that. `Drop` of [`OwnedPicture`] does.

use std::{fmt, io, ptr::NonNull, slice};

use re_rav1d::{
    Dav1dResult,
    include::dav1d::{
        data::Dav1dData,
        dav1d::{Dav1dContext, Dav1dSettings},
        headers::{DAV1D_PIXEL_LAYOUT_I420, DAV1D_PIXEL_LAYOUT_I422, DAV1D_PIXEL_LAYOUT_I444},
        picture::Dav1dPicture,
    },
    src::lib::{
        dav1d_close, dav1d_data_create, dav1d_data_unref, dav1d_default_settings, dav1d_flush,
        dav1d_get_picture, dav1d_open, dav1d_picture_unref, dav1d_send_data,
    },
};

use crate::picture::{Colour, Layout, Plane};

/// Why rav1d gave nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dav1dError {
    /// It wants to be asked for a picture, or given a unit, first.
    Again,
    /// An error number of the system, by which rav1d says what is wrong.
    Because(i32),
}

impl Dav1dError {
    fn of(result: Dav1dResult) -> Result<(), Self> {
        match -result.0 {
            0 => Ok(()),
            code if io::Error::from_raw_os_error(code).kind() == io::ErrorKind::WouldBlock => {
                Err(Self::Again)
            }
            code => Err(Self::Because(code)),
        }
    }
}

impl fmt::Display for Dav1dError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Again => f.write_str("try again"),
            // What dav1d says where it has no number.
            Self::Because(1) => f.write_str("the stream cannot be decoded"),
            Self::Because(code) => write!(f, "{}", io::Error::from_raw_os_error(*code)),
        }
    }
}

/// A decoder. It stays on the thread that opened it.
pub(super) struct Dav1d {
    context: Dav1dContext,
    /// What of a unit rav1d has not taken yet.
    pending: Option<Dav1dData>,
}

impl Dav1d {
    /// For frames of at most `pixels`.
    pub fn open(pixels: u32) -> Result<Self, Dav1dError> {
        let mut settings = std::mem::MaybeUninit::<Dav1dSettings>::uninit();
        // SAFETY: it writes the whole structure.
        let mut settings = unsafe {
            dav1d_default_settings(NonNull::new_unchecked(settings.as_mut_ptr()));
            settings.assume_init()
        };
        settings.n_threads = 1;
        settings.max_frame_delay = 1;
        settings.all_layers = 0;
        settings.frame_size_limit = pixels;
        #[cfg(test)]
        sabotage::sabotage(&mut settings.allocator);
        let mut context = None;
        // SAFETY: both outlive the call, which reads the settings and writes the context.
        let opened =
            unsafe { dav1d_open(Some(NonNull::from(&mut context)), Some(NonNull::from(&mut settings))) };
        Dav1dError::of(opened)?;
        match context {
            Some(context) => Ok(Self { context, pending: None }),
            None => Err(Dav1dError::Because(1)),
        }
    }

    /// Forgets what came before.
    pub fn flush(&mut self) {
        // SAFETY: the context was opened and not closed.
        unsafe { dav1d_flush(self.context) };
        if let Some(pending) = self.pending.take() {
            release(pending);
        }
    }

    /// Gives it a copy of a unit. [`Dav1dError::Again`]: a part of it, or of the one before, is still to be
    /// taken; ask for a picture, then [`send_pending`](Self::send_pending).
    pub fn send(&mut self, unit: &[u8]) -> Result<(), Dav1dError> {
        if let Some(before) = self.pending.take() {
            release(before);
        }
        let mut data = Dav1dData::default();
        // SAFETY: it writes `data`; the bytes that it returns, as many as were asked for, are `data`'s.
        let begin = unsafe { dav1d_data_create(Some(NonNull::from(&mut data)), unit.len()) };
        let Some(begin) = NonNull::new(begin) else {
            release(data);
            return Err(Dav1dError::Because(1));
        };
        // SAFETY: there is room for the unit, and nobody else has seen that memory.
        unsafe { begin.as_ptr().copy_from_nonoverlapping(unit.as_ptr(), unit.len()) };
        self.offer(data)
    }

    /// Gives it what is left of a unit.
    pub fn send_pending(&mut self) -> Result<(), Dav1dError> {
        self.pending.take().map_or(Ok(()), |data| self.offer(data))
    }

    fn offer(&mut self, mut data: Dav1dData) -> Result<(), Dav1dError> {
        // SAFETY: the context is open; of `data` it takes what it wants, and leaves the rest whole.
        let sent = unsafe { dav1d_send_data(Some(self.context), Some(NonNull::from(&mut data))) };
        match Dav1dError::of(sent) {
            Ok(()) if data.sz == 0 => Ok(()),
            Ok(()) | Err(Dav1dError::Again) => {
                self.pending = Some(data);
                Err(Dav1dError::Again)
            }
            Err(refused) => {
                release(data);
                Err(refused)
            }
        }
    }

    /// The next picture.
    pub fn picture(&mut self) -> Result<OwnedPicture, Dav1dError> {
        let mut held = OwnedPicture(Box::default());
        // SAFETY: the context is open. What it writes over owns nothing.
        let given = unsafe { dav1d_get_picture(Some(self.context), Some(NonNull::from(&mut *held.0))) };
        Dav1dError::of(given).map(|()| held)
    }
}

impl Drop for Dav1d {
    fn drop(&mut self) {
        self.flush();
        // SAFETY: the context is open, and this was the last use of it.
        unsafe { dav1d_close(Some(NonNull::from(&mut Some(self.context)))) };
    }
}

fn release(mut data: Dav1dData) {
    // SAFETY: `data` is whole, and not used again.
    unsafe { dav1d_data_unref(Some(NonNull::from(&mut data))) };
}

/// A picture, or the empty one that stands for none. It is given back before its decoder is closed.
pub(super) struct OwnedPicture(Box<Dav1dPicture>);

// SAFETY: what it points to is counted by atomic references, which rav1d hands to threads of its own, too;
// samples and headers are not written to any more, and the pool that the samples go back to has a lock.
unsafe impl Send for OwnedPicture {}

impl OwnedPicture {
    pub fn size(&self) -> (usize, usize) {
        let pixels = |side| usize::try_from(side).unwrap_or(0);
        (pixels(self.0.p.w), pixels(self.0.p.h))
    }

    pub fn bits(&self) -> i32 {
        self.0.p.bpc
    }

    /// None if it is monochrome.
    pub fn layout(&self) -> Option<Layout> {
        match self.0.p.layout {
            DAV1D_PIXEL_LAYOUT_I420 => Some(Layout::Yuv420),
            DAV1D_PIXEL_LAYOUT_I422 => Some(Layout::Yuv422),
            DAV1D_PIXEL_LAYOUT_I444 => Some(Layout::Yuv444),
            _ => None,
        }
    }

    /// dav1d's word is the sequence header's, which overrules the container's, as in FFmpeg.
    pub fn colour(&self) -> Option<Colour> {
        // SAFETY: rav1d keeps the header for as long as the picture, which this value owns.
        let header = unsafe { self.0.seq_hdr?.as_ref() };
        let matrix = u16::try_from(header.mtrx).ok()?;
        Some(Colour { matrix, full_range: header.color_range != 0 })
    }

    /// Planes of a picture of 8 bits that is not monochrome.
    pub fn planes(&self, layout: Layout) -> Option<[Plane<'_>; 3]> {
        let (_, height) = self.size();
        let chroma = if layout == Layout::Yuv420 { height.div_ceil(2) } else { height };
        let plane = |n: usize| {
            let stride = usize::try_from(self.0.stride[n.min(1)]).ok()?;
            let rows = if n == 0 { height } else { chroma };
            let begin = self.0.data[n]?.cast::<u8>();
            // SAFETY: rav1d's own allocator, which it was left, has made each plane of so many rows of so
            // many bytes, and more; nobody writes to a picture that was given out.
            let samples = unsafe { slice::from_raw_parts(begin.as_ptr(), stride * rows) };
            Some(Plane { samples, stride })
        };
        Some([plane(0)?, plane(1)?, plane(2)?])
    }
}

impl Drop for OwnedPicture {
    fn drop(&mut self) {
        // SAFETY: the picture is whole. What is left in its place is an empty one.
        unsafe { dav1d_picture_unref(Some(NonNull::from(&mut *self.0))) };
        if let Some(list) = self.0.itut_t35_ref.take() {
            // SAFETY: the empty picture owns this list, has it from `from_arc`, and is not used again.
            drop(unsafe { list.into_arc() });
        }
    }
}

/// Made to panic on purpose: by the callback with which rav1d asks for a picture's memory.
#[cfg(test)]
pub(super) mod sabotage {
    use std::{
        ffi::c_void,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use re_rav1d::{
        Dav1dResult,
        include::dav1d::picture::{Dav1dPicAllocator, Dav1dPicture},
        src::send_sync_non_null::SendSyncNonNull,
    };

    /// How many of the decoders that are opened next are to panic.
    pub static TO_PANIC: AtomicUsize = AtomicUsize::new(0);

    /// Gives a decoder that is being opened an allocator that panics, if it is its turn.
    pub fn sabotage(allocator: &mut Dav1dPicAllocator) {
        let less = |left: usize| left.checked_sub(1);
        if TO_PANIC.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            let (alloc, release) = (Some(panics as Alloc), Some(frees_nothing as Release));
            *allocator = Dav1dPicAllocator {
                cookie: None,
                alloc_picture_callback: alloc,
                release_picture_callback: release,
            };
        }
    }

    type Cookie = Option<SendSyncNonNull<c_void>>;
    type Alloc = unsafe extern "C" fn(*mut Dav1dPicture, Cookie) -> Dav1dResult;
    type Release = unsafe extern "C" fn(*mut Dav1dPicture, Cookie);

    unsafe extern "C" fn panics(_: *mut Dav1dPicture, _: Cookie) -> Dav1dResult {
        panic!("no memory for a picture");
    }

    unsafe extern "C" fn frees_nothing(_: *mut Dav1dPicture, _: Cookie) {}
}
