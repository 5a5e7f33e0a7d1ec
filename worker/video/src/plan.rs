//! Which samples to decode for a batch's wishes: each once, from keyframes on.

use crate::index::VideoIndex;

/// Wishes that one stretch of decoding fulfils.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The keyframe where decoding begins.
    pub start: u32,
    /// What is wanted, in decode order.
    pub wishes: Vec<Wish>,
}

/// A frame that was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    /// The sample that holds it.
    pub sample: u32,
    /// Place in the caller's list.
    pub place: usize,
}

/// Groups wishes by where decoding begins. Frames beyond the last are left out; the caller has seen to them.
pub(crate) fn runs(index: &VideoIndex, frames: &[usize]) -> Vec<Run> {
    let mut wishes: Vec<(u32, Wish)> = (frames.iter().enumerate())
        .filter_map(|(place, &frame)| index.sample_of(frame).map(|sample| Wish { sample, place }))
        .map(|wish| (index.samples[wish.sample as usize].start, wish))
        .collect();
    wishes.sort_by_key(|(start, wish)| (*start, wish.sample, wish.place));
    let mut runs: Vec<Run> = Vec::new();
    for (start, wish) in wishes {
        match runs.last_mut() {
            Some(run) if run.start == start => run.wishes.push(wish),
            _ => runs.push(Run { start, wishes: vec![wish] }),
        }
    }
    runs
}

/// The samples of a run from `next` (where a decoder stands) to the last wish. Pictures shown before the
/// keyframe that follows their own group ("open" groups) are no part of it.
pub(crate) fn samples(index: &VideoIndex, run: &Run, next: u32) -> Vec<u32> {
    let last = run.wishes.last().map_or(next, |wish| wish.sample + 1);
    // A leading picture needs everything from its group's keyframe on, the next keyframe included.
    let leads = |sample: u32| index.samples[sample as usize].start < run.start;
    (next..last).filter(|&sample| !leads(sample)).collect()
}
