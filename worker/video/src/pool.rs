//! A bounded set of open decoders, each remembering where it stands, so that neighbouring wishes go on from there.

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
}

/// Decoders that are open at once, at most `capacity`; the one that was used longest ago makes way. One belongs to one
/// thread. Memory is `capacity` times what a decoder keeps (about ten frames in 4:2:0), whatever is asked for.
pub struct DecoderPool {
    slots: Vec<Slot>,
    capacity: usize,
    clock: u64,
    counts: Counts,
    /// Bytes of neighbouring samples.
    buffer: Vec<u8>,
}

struct Slot {
    decoder: Decoder,
    fits: Fits,
    at: Option<Position>,
    used: u64,
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
        let capacity = capacity.max(1);
        Self { slots: Vec::new(), capacity, clock: 0, counts: Counts::default(), buffer: Vec::new() }
    }

    /// Decoders that are open now.
    pub fn open(&self) -> usize {
        self.slots.len()
    }

    /// What the pool has done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Decodes frames of one video, in any order, repeats allowed. `take` gets each place of `frames` once, with the
    /// picture or with why there is none; a fault costs the frames that need the faulty picture and no others.
    pub fn decode(
        &mut self,
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
    pub fn rgb(&mut self, video: &Video, frames: &[usize]) -> Vec<Result<Vec<u8>, VideoError>> {
        let mut out: Vec<Result<Vec<u8>, VideoError>> = frames.iter().map(|_| Ok(Vec::new())).collect();
        self.decode(video, frames, &mut |place, picture| out[place] = picture.map(Picture::to_rgb));
        out
    }

    /// One stretch of decoding. A decoder that met a fault is closed: what it holds is not to be trusted.
    fn run(
        &mut self,
        video: &Video,
        run: &Run,
        take: &mut dyn FnMut(usize, &Picture<'_>),
    ) -> Result<(), Fault> {
        let mut slot = self.slot_for(video, run)?;
        let result = self.run_on(&mut slot, video, run, take);
        if result.is_ok() {
            self.clock += 1;
            slot.used = self.clock;
            self.slots.push(slot);
        }
        result
    }

    fn run_on(
        &mut self,
        slot: &mut Slot,
        video: &Video,
        run: &Run,
        take: &mut dyn FnMut(usize, &Picture<'_>),
    ) -> Result<(), Fault> {
        let index = video.index();
        let next = match slot.at {
            Some(at) => at.next,
            None => {
                slot.decoder.restart(&index.stream)?;
                self.counts.seeks += 1;
                run.start
            }
        };
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut first = 0;
        for group in reads(index, &samples(index, run, next)) {
            let at = read(video, group, &mut buffer)?;
            for &sample in group {
                let of = index.samples[sample as usize];
                let bytes = &buffer[(of.offset - at) as usize..][..of.size as usize];
                let wanted = run.wishes[first..].iter().take_while(|wish| wish.sample == sample).count();
                let mut show =
                    |picture: &Picture<'_>| (first..first + wanted).for_each(|wish| take(wish, picture));
                let show = (wanted > 0).then_some(&mut show as Show<'_>);
                let decoded = slot.decoder.decode(bytes, index, show)?;
                *if decoded { &mut self.counts.decoded } else { &mut self.counts.skipped } += 1;
                first += wanted;
                slot.at = Some(Position { video: video.id, start: run.start, next: sample + 1 });
            }
        }
        // One large sample is not to be paid for ever after.
        buffer.shrink_to(MAX_READ_BYTES as usize);
        self.buffer = buffer;
        Ok(())
    }

    /// Takes the decoder that stands before the first wish of the run, or one to begin again with.
    fn slot_for(&mut self, video: &Video, run: &Run) -> Result<Slot, Fault> {
        let wish = run.wishes.first().map_or(run.start, |wish| wish.sample);
        let ready = |slot: &Slot| {
            slot.at
                .filter(|at| at.video == video.id && at.start == run.start && at.next <= wish)
                .map(|at| at.next)
        };
        // Of several the one that is furthest: it has the least to do.
        let places = self.slots.iter().enumerate().filter_map(|(place, slot)| Some((ready(slot)?, place)));
        if let Some((_, place)) = places.max() {
            return Ok(self.slots.swap_remove(place));
        }
        let fits = Fits::of(video.index());
        if self.slots.len() >= self.capacity {
            let oldest = |slots: &[Slot], fitting: bool| {
                let slots = slots.iter().enumerate().filter(|(_, slot)| !fitting || slot.fits == fits);
                slots.min_by_key(|(_, slot)| slot.used).map(|(place, _)| place)
            };
            // The oldest that fits is begun again; where none fits, the oldest is closed.
            let place = oldest(&self.slots, true).or_else(|| oldest(&self.slots, false));
            let slot = place.map(|place| self.slots.swap_remove(place));
            if let Some(slot) = slot.filter(|slot| slot.fits == fits) {
                return Ok(Slot { at: None, ..slot });
            }
        }
        self.counts.opened += 1;
        Ok(Slot { decoder: Decoder::new(video.index())?, fits, at: None, used: 0 })
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
