//! Tracks as a run sees them: a folder each, or a sample of a tar shard, with a WAV file for each stem and,
//! if there is one, `mixture.wav`; without it the mixture is the stems' sum.
//!
//! [`Tracks::from_spec`] reads every header, so that what people can mend is said before anything starts: a
//! file that ends early, too, whose missing segments are their own faults, as is what only shows when a
//! segment is read. The run goes on without them. What remains of a track after its last whole segment is
//! left out.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{
    DataError, Fingerprint, TrainingSamples,
    shards::{Shards, names_shards},
    surviving::surviving,
};
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, CopySample, Sample, Samples};

use super::{
    batch::{SegmentBatch, SegmentSample},
    wav::{Wav, WavPlace},
};
use crate::{
    separation::config::{SeparationSettings, TrackData},
    settings::checked,
};

/// How far a mixture may be from the sum of its stems: what 8 bits round to.
const MIXED: f32 = 1.0 / 128.0;

/// Above it a peak is no loud music, but whole numbers that were not divided by their full scale.
const LOUD: f32 = 16.0;

/// Where the files of a track lie.
#[derive(Debug)]
enum Home {
    /// A folder, by its path.
    Folder(PathBuf),
    /// A sample of shards.
    Sample(Arc<Shards>, u64),
}

impl Home {
    /// The place of `{name}.wav`, if it is there.
    fn file(&self, name: &str) -> Option<WavPlace> {
        match self {
            Self::Folder(dir) => {
                let path = dir.join(format!("{name}.wav"));
                path.is_file().then_some(WavPlace::File(path))
            }
            Self::Sample(shards, sample) => {
                let member = shards.with_ending(*sample, &format!("{}.wav", name.to_lowercase()))?;
                Some(WavPlace::Member(shards.clone(), member))
            }
        }
    }

    fn missing(&self, name: &str) -> DataError {
        let field = format!("{name}.wav");
        let remedy = "add the file, correct data.stems, or remove the track";
        match self {
            Self::Folder(dir) => DataError::invalid(dir, field, "does not exist", remedy),
            Self::Sample(shards, sample) => match shards.members(*sample).next() {
                Some(member) => shards.fault(member, format!("{field} is missing from the sample"), remedy),
                None => DataError::OutOfRange { what: "track", index: *sample, len: shards.len() },
            },
        }
    }
}

/// A track: its files, and its segments' place among all.
#[derive(Debug)]
pub struct Track {
    home: Home,
    mixture: Option<Wav>,
    stems: Vec<Wav>,
    /// The number of its first segment, and how many it has.
    first: u64,
    segments: u64,
}

/// An opened folder of tracks. Shared between threads.
pub struct Tracks {
    root: PathBuf,
    shards: Option<Arc<Shards>>,
    tracks: Vec<Track>,
    data: TrackData,
    /// Frames of a segment's spectrum.
    frames: usize,
    training: Arc<TrainingSamples>,
    fingerprint: Fingerprint,
}

impl Tracks {
    /// Opens the run's folder.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, DataError> {
        let SeparationSettings { data, network, .. } = checked(SeparationSettings::from_spec(spec))?;
        let root = PathBuf::from(&spec.data.path);
        let mut tracks = Vec::new();
        let mut first = 0;
        let (shards, homes) = homes(&root)?;
        for home in homes {
            let track = Track::read_headers(home, &data, first)?;
            first += track.segments;
            tracks.push(track);
        }
        let held_out =
            |at: usize| data.holdout_every > 0 && (at as u64 + 1).is_multiple_of(data.holdout_every);
        let trained = tracks.iter().enumerate().filter(|(at, _)| !held_out(*at));
        let training =
            TrainingSamples::new(trained.map(|(_, track)| track.first..track.first + track.segments));
        if training.is_empty() {
            let found = format!("{} tracks, none left to train on", tracks.len());
            let remedy = match shards {
                Some(_) => {
                    "for each track, add one file for each of data.stems to the shards, such as `song.drums.wav`"
                }
                None => "make a folder for each track, with one WAV file for each of data.stems",
            };
            return Err(DataError::invalid(&root, "(folder)", found, remedy));
        }
        let fingerprint = fingerprint(&tracks, shards.as_deref())?;
        let frames = 1 + data.segment() / network.hop;
        Ok(Self { root, shards, tracks, data, frames, training: Arc::new(training), fingerprint })
    }

    /// Every track that cannot be used, where [`Tracks::from_spec`] would name the first alone.
    pub fn faults(root: &Path, data: &TrackData) -> Vec<DataError> {
        match homes(root) {
            Ok((_, homes)) => {
                homes.into_iter().filter_map(|home| Track::read_headers(home, data, 0).err()).collect()
            }
            Err(error) => vec![error],
        }
    }

    /// Segments, held-out ones included.
    pub fn len(&self) -> u64 {
        self.tracks.last().map_or(0, |track| track.first + track.segments)
    }

    /// Never true: opening refuses an empty folder.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Segment `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<SegmentSample, DataError> {
        if index >= self.len() {
            return Err(DataError::OutOfRange { what: "sample", index, len: self.len() });
        }
        let track = self.track_of(index);
        let start = self.start_of(track, index);
        let read = |wav: &Wav| {
            let blame = |words| self.fault_in(wav, index, words);
            surviving(|| wav.read_frames(start, self.data.segment()).map_err(blame), blame)
        };
        let mut stems = Vec::with_capacity(track.stems.len() * 2 * self.data.segment());
        for stem in &track.stems {
            stems.extend(read(stem)?);
        }
        let mixture = match &track.mixture {
            Some(mixture) => read(mixture)?,
            None => sum(&stems, track.stems.len()),
        };
        Ok(SegmentSample { index, mixture: Arc::new(mixture), stems: Arc::new(stems) })
    }
}

impl Tracks {
    fn track_of(&self, index: u64) -> &Track {
        &self.tracks[self.tracks.partition_point(|track| track.first <= index) - 1]
    }

    /// Where a segment begins in its track, in samples.
    fn start_of(&self, track: &Track, index: u64) -> u64 {
        (index - track.first) * self.data.stride() as u64
    }

    /// What is wrong with a segment in one of its files.
    fn fault_in(&self, wav: &Wav, index: u64, fault: String) -> DataError {
        let number = self.tracks.partition_point(|track| track.first <= index) - 1;
        DataError::Sample {
            path: wav.place.to_string().into(),
            index,
            episode: number as u64,
            frame: self.start_of(&self.tracks[number], index),
            feature: "segment".into(),
            fault,
        }
    }
}

impl Track {
    fn read_headers(home: Home, data: &TrackData, first: u64) -> Result<Self, DataError> {
        let wav =
            |name: &str| home.file(name).map(|place| Wav::read_header(place, data.sample_rate)).transpose();
        let mut stems = Vec::new();
        for stem in &data.stems {
            stems.push(wav(stem)?.ok_or_else(|| home.missing(stem))?);
        }
        let mixture = wav("mixture")?;
        let frames = stems[0].frames;
        if let Some(other) = stems.iter().chain(&mixture).find(|wav| wav.frames != frames) {
            let found = format!("{} samples, but {} has {frames}", other.frames, stems[0].place);
            let remedy = "cut or pad the files of a track to one length, or remove the track";
            return Err(other.place.invalid("length", found, remedy));
        }
        let Some(beyond) = frames.checked_sub(data.segment() as u64) else {
            let found = format!("{frames} samples, fewer than a segment's {}", data.segment());
            let remedy = "lower data.segment_seconds or remove the track";
            return Err(stems[0].place.invalid("length", found, remedy));
        };
        let segments = 1 + beyond / data.stride() as u64;
        Ok(Self { home, mixture, stems, first, segments })
    }
}

/// Where tracks lie, by name; and the shards, if they are in shards.
fn homes(root: &Path) -> Result<(Option<Arc<Shards>>, Vec<Home>), DataError> {
    if names_shards(root) {
        let shards = Arc::new(Shards::open(root)?);
        let homes = (0..shards.len()).map(|sample| Home::Sample(shards.clone(), sample)).collect();
        return Ok((Some(shards), homes));
    }
    Ok((None, folders(root)?.into_iter().map(Home::Folder).collect()))
}

/// The folders in a folder, by name.
fn folders(root: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(root).map_err(DataError::io(root, "list"))? {
        let path = entry.map_err(DataError::io(root, "list"))?.path();
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if path.is_dir() && !hidden {
            folders.push(path);
        }
    }
    folders.sort();
    Ok(folders)
}

/// Names folders and samples by their own names and files by their content: a set may be moved.
fn fingerprint(tracks: &[Track], shards: Option<&Shards>) -> Result<Fingerprint, DataError> {
    let mut hasher = blake3::Hasher::new();
    if let Some(shards) = shards {
        hasher.update(&shards.fingerprint().0);
    }
    for track in tracks {
        if let Home::Folder(dir) = &track.home {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        }
        hasher.update(&[u8::from(track.mixture.is_some())]);
        for wav in track.stems.iter().chain(&track.mixture) {
            wav.name(&mut hasher)?;
        }
    }
    Ok(Fingerprint(*hasher.finalize().as_bytes()))
}

/// The sum of so many signals, one after the other.
fn sum(signals: &[f32], count: usize) -> Vec<f32> {
    let mut parts = signals.chunks_exact(signals.len() / count);
    let mut sum = parts.next().unwrap_or_default().to_vec();
    parts.for_each(|part| sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += value));
    sum
}

impl Samples for Tracks {
    fn training(&self) -> &Arc<TrainingSamples> {
        &self.training
    }

    fn holdout(&self) -> Vec<u64> {
        (0..self.len()).filter(|index| self.training.number(*index).is_none()).collect()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn doubts(&self, sample: &dyn Sample) -> Vec<(&'static str, DataError)> {
        let sample: &SegmentSample = sample.content();
        let track = self.track_of(sample.index);
        let at = |wav: &Wav, what: String| self.fault_in(wav, sample.index, what);
        let mut doubts = Vec::new();
        let stems = sample.stems.chunks_exact(sample.mixture.len().max(1));
        for (wav, stem) in track.stems.iter().zip(stems) {
            if stem.iter().all(|value| *value == 0.0) {
                doubts.push(("silent", at(wav, "the whole segment is silent".into())));
            }
            let peak = stem.iter().fold(0.0, |peak: f32, value| peak.max(value.abs()));
            if peak > LOUD {
                let what = format!(
                    "a peak of {peak:.0}, but full scale is 1; divide the samples by their full scale"
                );
                doubts.push(("loud", at(wav, what)));
            }
        }
        if let Some(mixture) = &track.mixture {
            let all = sum(&sample.stems, track.stems.len());
            let apart = all.iter().zip(&*sample.mixture).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            if apart > MIXED {
                let what = format!(
                    "differs from the sum of its stems by up to {apart:.3} of full scale; mix the stems again, or remove \
                     this file: without it, their sum is the mixture"
                );
                doubts.push(("mixture", at(mixture, what)));
            }
        }
        doubts
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&SegmentSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(SegmentBatch::from_samples(step, self.frames, &samples))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        batch.content::<SegmentBatch>().segments.iter().map(CopySample::boxed).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        // A segment is needed by its own sample alone.
        let begin = self.training.number(index).unwrap_or_default();
        DamagedRow { row: index, begin, end: begin + 1 }
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let held_out = match self.data.holdout_every {
            0 => "none held out".to_owned(),
            every => format!("one of {every} held out"),
        };
        let minutes = |samples: u64| samples as f64 / f64::from(self.data.sample_rate) / 60.0;
        let all: u64 = self.tracks.iter().map(|track| track.stems[0].frames).sum();
        let tracks = format!(
            "{} tracks of {} in {}, {:.1} minutes at {} Hz, {held_out}",
            self.tracks.len(),
            self.data.stems.join(" + "),
            self.root.display(),
            minutes(all),
            self.data.sample_rate
        );
        let segments = format!("{} of {} s", self.len(), self.data.segment_seconds);
        Ok(vec![("tracks", tracks), ("segments", segments)])
    }

    fn warnings(&self) -> Vec<String> {
        let files = || self.tracks.iter().flat_map(|track| track.stems.iter().chain(&track.mixture));
        let mut cut = files().filter(|wav| wav.there < wav.frames);
        let told = cut.next().map(|Wav { place, frames, there }| {
            let others = match cut.count() {
                0 => String::new(),
                more => format!(", like {more} more of {} files", files().count()),
            };
            format!(
                "{place}: ends early (after {there} of {frames} samples){others}: segments past the end are left out; copy or write the \
                 file again"
            )
        });
        self.shards.as_deref().map_or_else(Vec::new, Shards::warnings).into_iter().chain(told).collect()
    }
}
