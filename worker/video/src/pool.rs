//! A bounded set of open decoders, each remembering where it stands, so that neighbouring wishes go on from
//! there.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::codec::Codec;
use crate::decoder::Decoder;
use crate::error::{Fault, VideoError};
use crate::index::{Video, VideoIndex};
use crate::limits::MAX_READ_BYTES;
use crate::picture::{Picture, Show};
use crate::plan::{Run, runs, samples};

/// What a pool has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Decoders made.
    pub opened: u64,
    /// Times decoding began at a keyframe.
    pub seeks: u64,
    /// Pictures decoded, wanted or on the way to a wanted one.
    pub decoded: u64,
    /// Pictures passed over, because nothing refers to them.
    pub skipped: u64,
    /// Pictures handed over to those who wanted them.
    pub shown: u64,
}

/// Open decoders that threads share: each call borrows those it needs. At most `capacity` are open, or one
/// for each call in progress if those are more; the one that was used longest ago makes way. Memory is that
/// many times what a decoder keeps (about ten frames in 4:2:0), whatever is asked for.
pub struct DecoderPool {
    capacity: usize,
    shelf: Mutex<Shelf>,
}

/// Decoders that are in no call now.
#[derive(Default)]
struct Shelf {
    slots: Vec<Slot>,
    /// Decoders that are in a call now.
    lent: usize,
    clock: u64,
    counts: Counts,
}

struct Slot {
    decoder: Decoder,
    fits: Fits,
    at: Option<Position>,
    used: u64,
    /// Bytes of neighbouring samples.
    buffer: Vec<u8>,
}

/// What a decoder was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fits {
    codec: Codec,
    width: usize,
    height: usize,
}

impl Fits {
    fn of(index: &VideoIndex) -> Self {
        Self { codec: index.codec, width: index.width, height: index.height }
    }
}

/// Where a decoder stands: the next sample it can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    video: u64,
    start: u32,
    next: u32,
}

impl DecoderPool {
    /// An empty pool; decoders are opened when they are needed.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), shelf: Mutex::default() }
    }

    /// Decoders that are open now.
    pub fn open_count(&self) -> usize {
        let shelf = self.shelf();
        shelf.slots.len() + shelf.lent
    }

    /// What the pool has done so far.
    pub fn counts(&self) -> Counts {
        self.shelf().counts
    }

    /// Decodes frames of one video, in any order, repeats allowed. `take` gets each place of `frames` once,
    /// with the picture or with why there is none; a fault costs the frames that need the faulty picture and
    /// no others.
    pub fn decode(
        &self,
        video: &Video,
        frames: &[usize],
        take: &mut dyn FnMut(usize, Result<&Picture<'_>, VideoError>),
    ) {
        let count = video.index().frames();
        for (place, &frame) in frames.iter().enumerate().filter(|&(_, &frame)| frame >= count) {
            take(place, Err(VideoError::frame(video.path(), frame, Fault::NoSuchFrame { frames: count })));
        }
        for run in runs(video.index(), frames) {
            let mut done = 0;
            let result = self.run(video, &run, &mut |wish, picture| {
                done = wish + 1;
                take(run.wishes[wish].place, Ok(picture));
            });
            if let Err(fault) = result {
                for wish in &run.wishes[done..] {
                    take(wish.place, Err(VideoError::frame(video.path(), frames[wish.place], fault.clone())));
                }
            }
        }
    }

    /// Frames as RGB, `height x width x 3` each, in the order of `frames`.
    pub fn rgb(&self, video: &Video, frames: &[usize]) -> Vec<Result<Vec<u8>, VideoError>> {
        let mut out: Vec<Result<Vec<u8>, VideoError>> = frames.iter().map(|_| Ok(Vec::new())).collect();
        self.decode(video, frames, &mut |place, picture| out[place] = picture.map(Picture::to_rgb));
        out
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // No call panics while it holds the shelf, which is whole after each statement anyway.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One stretch of decoding, outside the lock. A decoder that met a fault is closed: what it holds is not
    /// to be trusted.
    fn run(&self, video: &Video, run: &Run, take: &mut dyn FnMut(usize, &Picture<'_>)) -> Result<(), Fault> {
        let mut lent = DecoderLease { pool: self, slot: None, counts: Counts::default() };
        let slot = self.shelf().slot_for(video, run, self.capacity);
        let slot = match slot {
            Some(slot) => slot,
            None => {
                lent.counts.opened += 1;
                Slot::new(video.index())?
            }
        };
        let slot = slot.run(video, run, take, &mut lent.counts)?;
        lent.slot = Some(slot);
        Ok(())
    }
}

/// A call in progress: at its end, however it ends, its decoder goes back, if it is still to be trusted.
struct DecoderLease<'a> {
    pool: &'a DecoderPool,
    slot: Option<Slot>,
    counts: Counts,
}

impl Drop for DecoderLease<'_> {
    fn drop(&mut self) {
        let mut shelf = self.pool.shelf();
        shelf.lent -= 1;
        let Counts { opened, seeks, decoded, skipped, shown } = &mut shelf.counts;
        *opened += self.counts.opened;
        *seeks += self.counts.seeks;
        *decoded += self.counts.decoded;
        *skipped += self.counts.skipped;
        *shown += self.counts.shown;
        if let Some(slot) = self.slot.take() {
            shelf.clock += 1;
            let used = shelf.clock;
            shelf.slots.push(Slot { used, ..slot });
        }
        shelf.close_down_to(self.pool.capacity);
    }
}

impl Shelf {
    /// Lends the decoder that stands before the first wish of the run, or one to begin again with; none if
    /// one is to be opened.
    fn slot_for(&mut self, video: &Video, run: &Run, capacity: usize) -> Option<Slot> {
        let slot = self.standing_before(video, run).or_else(|| self.oldest_that_fits(video, capacity));
        self.lent += 1;
        slot
    }

    fn standing_before(&mut self, video: &Video, run: &Run) -> Option<Slot> {
        let wish = run.wishes.first().map_or(run.start, |wish| wish.sample);
        let ready = |slot: &Slot| {
            let at = slot.at?;
            (at.video == video.id && at.start == run.start && at.next <= wish).then_some(at.next)
        };
        // Of several the one that is furthest: it has the least to do.
        let places = self.slots.iter().enumerate().filter_map(|(place, slot)| Some((ready(slot)?, place)));
        let (_, place) = places.max()?;
        Some(self.slots.swap_remove(place))
    }

    /// The oldest that fits, once no more may be opened; where none fits, room is made.
    fn oldest_that_fits(&mut self, video: &Video, capacity: usize) -> Option<Slot> {
        if self.slots.len() + self.lent < capacity {
            return None;
        }
        let fits = Fits::of(video.index());
        let fitting = self.slots.iter().enumerate().filter(|(_, slot)| slot.fits == fits);
        match fitting.min_by_key(|(_, slot)| slot.used).map(|(place, _)| place) {
            Some(place) => Some(Slot { at: None, ..self.slots.swap_remove(place) }),
            None => {
                self.close_down_to(capacity - 1);
                None
            }
        }
    }

    /// Closes those that were used longest ago until so many are open, or all that are left are in calls.
    fn close_down_to(&mut self, open: usize) {
        while self.slots.len() + self.lent > open {
            let oldest = self.slots.iter().enumerate().min_by_key(|(_, slot)| slot.used);
            let Some((place, _)) = oldest else { return };
            self.slots.swap_remove(place);
        }
    }
}

impl Slot {
    fn new(index: &VideoIndex) -> Result<Self, Fault> {
        let (decoder, fits) = (Decoder::new(index)?, Fits::of(index));
        Ok(Self { decoder, fits, at: None, used: 0, buffer: Vec::new() })
    }

    /// Decodes to the last wish of the run; on success it stands behind that.
    fn run(
        mut self,
        video: &Video,
        run: &Run,
        take: &mut dyn FnMut(usize, &Picture<'_>),
        counts: &mut Counts,
    ) -> Result<Self, Fault> {
        let index = video.index();
        let next = match self.at {
            Some(at) => at.next,
            None => {
                self.decoder.restart(&index.stream)?;
                counts.seeks += 1;
                run.start
            }
        };
        let mut first = 0;
        for group in reads(index, &samples(index, run, next)) {
            let at = read(video, group, &mut self.buffer)?;
            for &sample in group {
                let of = index.samples[sample as usize];
                let bytes = &self.buffer[(of.offset - at) as usize..][..of.size as usize];
                let wanted = run.wishes[first..].iter().take_while(|wish| wish.sample == sample).count();
                let mut show =
                    |picture: &Picture<'_>| (first..first + wanted).for_each(|wish| take(wish, picture));
                let show = (wanted > 0).then_some(&mut show as Show<'_>);
                let decoded = self.decoder.decode(bytes, index, show)?;
                *if decoded { &mut counts.decoded } else { &mut counts.skipped } += 1;
                counts.shown += wanted as u64;
                first += wanted;
                self.at = Some(Position { video: video.id, start: run.start, next: sample + 1 });
            }
        }
        // One large sample is not to be paid for ever after.
        self.buffer.shrink_to(MAX_READ_BYTES as usize);
        Ok(self)
    }
}

/// Splits samples into groups that are read at once: neighbours in the file, up to [`MAX_READ_BYTES`].
fn reads<'a>(index: &'a VideoIndex, samples: &'a [u32]) -> impl Iterator<Item = &'a [u32]> {
    let mut rest = samples;
    std::iter::from_fn(move || {
        let of = |n: usize| index.samples[rest[n] as usize];
        let begin = (!rest.is_empty()).then(|| of(0).offset)?;
        let follows = |n: &usize| {
            let (before, this) = (of(n - 1), of(*n));
            let end = this.offset.saturating_add(this.size.into());
            this.offset == before.offset + u64::from(before.size) && end - begin <= MAX_READ_BYTES
        };
        let group = 1 + (1..rest.len()).take_while(follows).count();
        let (group, after) = rest.split_at(group);
        rest = after;
        Some(group)
    })
}

/// Reads a group into `buffer` and says where in the file it begins.
fn read(video: &Video, group: &[u32], buffer: &mut Vec<u8>) -> Result<u64, Fault> {
    let of = |sample: Option<&u32>| sample.map(|&sample| video.index().samples[sample as usize]);
    let (Some(first), Some(last)) = (of(group.first()), of(group.last())) else { return Ok(0) };
    buffer.resize((last.offset + u64::from(last.size) - first.offset) as usize, 0);
    video.source.read(first.offset, buffer)?;
    Ok(first.offset)
}
