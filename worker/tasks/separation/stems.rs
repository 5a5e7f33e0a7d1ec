//! Whole mixtures taken apart into files: `cox generate --audio`.
//!
//! ```text
//! mixture   ├──── segment ────┤
//!                         ├──── segment ────┤           a quarter of each is the next one's, too
//!                                ├──── segment ────┤    the last one ends where the mixture does
//! ```
//!
//! The network hears what it was trained on: segments of one length. Where several cover a sample, their
//! estimates are weighted by its distance from the segment's nearer end, up to a quarter of it. One segment
//! is in memory at a time, however long a mixture is; one that is shorter than a segment ends in silence.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, BufWriter},
    ops::Range,
    path::{Path, PathBuf},
};

use coxswain_nn::{
    files::{read_tensors, replace},
    kernels::Tape,
    params::Trainables,
};
use coxswain_task::{ConvertJob, TaskError};
use hound::{SampleFormat, WavSpec, WavWriter};

use super::{
    data::{CHANNELS, Wav, WavPlace},
    objective::{SeparationObjective, WEIGHTS},
};
use crate::pretrained;

/// What of a segment is the next one's, too.
const SHARED: usize = 4;
/// Most bytes of values that a WAV file has; its header has less than the rest of what 32 bits count.
const MOST_BYTES: u64 = u32::MAX as u64 - 4096;

/// The stems of each mixture of a job.
pub(super) fn convert<B: Tape<Base = B>>(
    job: &ConvertJob<'_>,
    device: &B::Device,
) -> Result<Vec<Vec<PathBuf>>, TaskError> {
    let (objective, layout) = SeparationObjective::new(job.spec).map_err(TaskError::bad_input)?;
    let mixtures = mixtures(job, objective.settings.data.sample_rate)?;
    let (mut values, weights) = (vec![0.0; layout.len()], job.results.join(WEIGHTS.path));
    let tensors = if weights.is_file() { read_tensors(&weights) } else { Ok(Vec::new()) };
    let unread = |error: io::Error| TaskError::bad_input(format!("{}: {error}", weights.display()));
    pretrained::fill(job.results, tensors.map_err(unread)?, &layout, &mut values)?;
    let trained = TrainedSeparator { objective, trainables: Trainables::<B>::new(layout, values, device) };
    mixtures.iter().map(|(mixture, dir)| trained.take_apart(mixture, dir)).collect()
}

/// A separator with what it has learned.
struct TrainedSeparator<B: Tape<Base = B>> {
    objective: SeparationObjective,
    trainables: Trainables<B>,
}

impl<B: Tape<Base = B>> TrainedSeparator<B> {
    /// Writes the stems of a mixture, all or none.
    fn take_apart(&self, mixture: &Wav, dir: &Path) -> Result<Vec<PathBuf>, TaskError> {
        let data = &self.objective.settings.data;
        let paths: Vec<PathBuf> = data.stems.iter().map(|stem| dir.join(format!("{stem}.wav"))).collect();
        let unwritten =
            |error: io::Error| TaskError::io(format!("write stems to {}: {error}", dir.display()));
        fs::create_dir_all(dir).map_err(unwritten)?;
        let estimate = |place: Range<usize>| {
            let heard = mixture.read_frames(place.start as u64, place.len()).map_err(|fault| {
                io::Error::other(TaskError::bad_input(format!("{}: {fault}", mixture.place)))
            })?;
            Ok(self.objective.estimates(&self.trainables, &heard))
        };
        let mut write = |staged: &[PathBuf]| {
            let mut files = StemFiles::create(staged, data.sample_rate)?;
            through(mixture.frames as usize, data.segment(), estimate, |signals| files.write(signals))?;
            files.finish()
        };
        replace_all(&paths, &mut Vec::new(), &mut write).map_err(|error| {
            // Unless others' stems are in it.
            let _ = fs::remove_dir(dir);
            error.downcast::<TaskError>().unwrap_or_else(unwritten)
        })?;
        tracing::info!("{}: stems written", mixture.place);
        Ok(paths)
    }
}

/// The files of a job, and where the stems of each go. All are looked at before the first is taken apart.
fn mixtures(job: &ConvertJob<'_>, rate: u32) -> Result<Vec<(Wav, PathBuf)>, TaskError> {
    let (mut names, mut mixtures) = (BTreeSet::new(), Vec::new());
    for path in job.files {
        let refused = |problem: String| Err(TaskError::bad_input(format!("{}: {problem}", path.display())));
        let wav = Wav::read_header(WavPlace::File(path.clone()), rate).map_err(TaskError::bad_input)?;
        if wav.frames * (size_of::<f32>() * CHANNELS) as u64 > MOST_BYTES {
            return refused(format!(
                "has {} samples, too many for a WAV file of floats; split the file",
                wav.frames
            ));
        }
        let name = path.file_stem().unwrap_or_default().to_owned();
        let dir = job.out.join(&name);
        if !names.insert(name) {
            return refused(format!(
                "another file's stems also go to {}; use a separate call with another `--out`",
                dir.display()
            ));
        }
        mixtures.push((wav, dir));
    }
    Ok(mixtures)
}

/// Hands `write` all signals of `len` samples piece by piece, put together from what `estimate` says of
/// segments; of the last place it is given no more than there is.
fn through(
    len: usize,
    segment: usize,
    mut estimate: impl FnMut(Range<usize>) -> io::Result<Vec<Vec<f32>>>,
    mut write: impl FnMut(&[Vec<f32>]) -> io::Result<()>,
) -> io::Result<()> {
    let (last, step) = (len.saturating_sub(segment), segment - segment / SHARED);
    let starts: Vec<usize> = (0..last).step_by(step).chain([last]).collect();
    let mut overlap = Overlap::new(segment);
    for (number, &start) in starts.iter().enumerate() {
        overlap.add(&estimate(start..(start + segment).min(len))?);
        let next = starts.get(number + 1).copied().unwrap_or(len);
        write(&overlap.drain_front(next - start))?;
    }
    Ok(())
}

/// Estimates of segments, added up.
struct Overlap {
    /// Weight of each sample of a segment.
    weights: Vec<f32>,
    /// Sums of each signal, times the weights.
    sums: Vec<Vec<f32>>,
    /// Sums of weights, at the samples of [`sums`](Self::sums).
    totals: Vec<f32>,
}

impl Overlap {
    fn new(segment: usize) -> Self {
        let most = (segment / SHARED).max(1);
        let weight = |at: usize| (at + 1).min(segment - at).min(most) as f32;
        Self { weights: (0..segment).map(weight).collect(), sums: Vec::new(), totals: vec![0.0; segment] }
    }

    fn add(&mut self, signals: &[Vec<f32>]) {
        self.sums.resize(signals.len(), vec![0.0; self.weights.len()]);
        for (sums, signal) in self.sums.iter_mut().zip(signals) {
            let values = sums.iter_mut().zip(signal).zip(&self.weights);
            values.for_each(|((sum, value), weight)| *sum += weight * value);
        }
        self.totals.iter_mut().zip(&self.weights).for_each(|(total, weight)| *total += weight);
    }

    /// The first samples of every signal, which no later segment covers. The others move up.
    fn drain_front(&mut self, samples: usize) -> Vec<Vec<f32>> {
        let segment = self.weights.len();
        let mut done = Vec::with_capacity(self.sums.len());
        for sums in &mut self.sums {
            done.push(sums.iter().zip(&self.totals).take(samples).map(|(sum, total)| sum / total).collect());
            sums.drain(..samples);
            sums.resize(segment, 0.0);
        }
        self.totals.drain(..samples);
        self.totals.resize(segment, 0.0);
        done
    }
}

/// A file for each stem, being written: 32-bit floats, so that nothing is clipped or rounded.
struct StemFiles(Vec<WavWriter<BufWriter<File>>>);

impl StemFiles {
    fn create(paths: &[PathBuf], sample_rate: u32) -> io::Result<Self> {
        let (channels, sample_format) = (CHANNELS as u16, SampleFormat::Float);
        let spec = WavSpec { channels, sample_rate, bits_per_sample: 32, sample_format };
        let writers = paths.iter().map(|path| WavWriter::create(path, spec).map_err(plain));
        Ok(Self(writers.collect::<io::Result<_>>()?))
    }

    /// `[stems, channels]` signals of one length.
    fn write(&mut self, signals: &[Vec<f32>]) -> io::Result<()> {
        for (writer, channels) in self.0.iter_mut().zip(signals.chunks_exact(CHANNELS)) {
            for frame in 0..channels[0].len() {
                channels.iter().try_for_each(|channel| writer.write_sample(channel[frame])).map_err(plain)?;
            }
        }
        Ok(())
    }

    fn finish(self) -> io::Result<()> {
        self.0.into_iter().try_for_each(|writer| writer.finalize().map_err(plain))
    }
}

fn plain(error: hound::Error) -> io::Error {
    match error {
        hound::Error::IoError(error) => error,
        other => io::Error::other(other),
    }
}

/// [`replace`] of several files at once, which `write` makes at the places it is given.
fn replace_all(
    paths: &[PathBuf],
    staged: &mut Vec<PathBuf>,
    write: &mut dyn FnMut(&[PathBuf]) -> io::Result<()>,
) -> io::Result<()> {
    let Some((first, others)) = paths.split_first() else { return write(staged) };
    replace(first, |place| {
        staged.push(place.into());
        replace_all(others, staged, write)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn estimates_that_are_the_mixture_come_together_to_it(len in 0usize..300, segment in 1usize..60) {
            let signal: Vec<f32> = (0..len).map(|at| (at * 7919 % 1013) as f32 - 506.0).collect();
            let estimate = |place: Range<usize>| {
                let mut heard = signal[place].to_vec();
                // Beyond the end there is whatever the network makes of silence.
                heard.resize(segment, 1e9);
                let negative = heard.iter().map(|value| -value).collect();
                Ok(vec![heard, negative])
            };
            let mut whole = [Vec::new(), Vec::new()];
            let write = |signals: &[Vec<f32>]| {
                whole.iter_mut().zip(signals).for_each(|(whole, signal)| whole.extend_from_slice(signal));
                Ok(())
            };
            through(len, segment, estimate, write).expect("nothing fails");
            prop_assert_eq!([whole[0].len(), whole[1].len()], [len; 2]);
            for (at, value) in signal.iter().enumerate() {
                prop_assert!((whole[0][at] - value).abs() < 1e-3, "{}: {}", at, whole[0][at]);
                prop_assert_eq!(whole[1][at], -whole[0][at]);
            }
        }
    }

    #[test]
    fn several_files_appear_together_or_none() {
        let dir = tempfile::tempdir().expect("a folder");
        let paths = ["a", "b", "c"].map(|name| dir.path().join(name));
        let mut broken = |staged: &[PathBuf]| -> io::Result<()> {
            staged.iter().try_for_each(|path| fs::write(path, "half"))?;
            Err(io::Error::other("the disk is full"))
        };
        let failed = replace_all(&paths, &mut Vec::new(), &mut broken).expect_err("it fails");
        assert_eq!(failed.to_string(), "the disk is full");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
        let mut sound = |staged: &[PathBuf]| staged.iter().try_for_each(|path| fs::write(path, "whole"));
        replace_all(&paths, &mut Vec::new(), &mut sound).expect("nothing fails");
        assert!(paths.iter().all(|path| fs::read(path).is_ok_and(|text| text == b"whole")));
    }
}
