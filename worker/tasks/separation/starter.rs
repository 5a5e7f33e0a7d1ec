//! A run file for tracks, from the names and headers of their files.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{DataError, shards::Shards, yaml::yaml_scalar};
use coxswain_task::{StarterFile, StarterJob};

use super::{
    config::is_stem,
    data::{Wav, WavPlace},
};
use crate::{
    found::{ending, files, folders, shards},
    starter::Starter,
};

/// Seconds of a sample, where tracks are so long.
const SEGMENT_S: f64 = 6.0;
/// Rates below which frames of music are longer than what is to be told apart.
const LOW_RATE: u32 = 16_000;

/// Tracks at a place that a user names.
struct FoundTracks {
    /// As `data.path` is to say it.
    path: PathBuf,
    tracks: u64,
    /// Names that every track has.
    stems: Vec<String>,
    /// A file of the first track.
    first: WavPlace,
}

/// The run file; nothing if there are no tracks.
pub fn starter(job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
    let found = in_folders(job.data).or_else(|| in_shards(job.data))?;
    Some(write(job, &found))
}

/// A track is a folder with WAV files.
fn in_folders(place: &Path) -> Option<FoundTracks> {
    let tracks = folders(place);
    let stems = tracks.iter().map(|dir| {
        let wavs = files(dir).into_iter().filter(|file| ending(file) == "wav");
        wavs.filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect()
    });
    let stems = in_all(stems)?;
    let first = WavPlace::File(tracks[0].join(format!("{}.wav", stems[0])));
    Some(FoundTracks { path: place.to_path_buf(), tracks: tracks.len() as u64, stems, first })
}

/// A track is a sample with members `.drums.wav`, `.bass.wav` and so on.
fn in_shards(place: &Path) -> Option<FoundTracks> {
    let (path, shards): (PathBuf, Shards) = shards(place)?.ok()?;
    let tracks = shards.len();
    let stems = (0..tracks).map(|sample| {
        let endings = shards.members(sample).filter_map(|member| shards.ending(member).strip_suffix(".wav"));
        endings.map(str::to_owned).collect()
    });
    let stems = in_all(stems)?;
    let first = shards.with_ending(0, &format!("{}.wav", stems[0]))?;
    Some(FoundTracks { path, tracks, stems, first: WavPlace::Member(Arc::new(shards), first) })
}

/// The names of stems that all tracks have; none if there are none.
fn in_all(tracks: impl Iterator<Item = BTreeSet<String>>) -> Option<Vec<String>> {
    let shared = tracks.reduce(|shared, track| shared.intersection(&track).cloned().collect())?;
    let stems: Vec<String> = shared.into_iter().filter(|name| is_stem(name)).collect();
    (!stems.is_empty()).then_some(stems)
}

fn write(job: &StarterJob<'_>, found: &FoundTracks) -> Result<StarterFile, DataError> {
    let (wav, rate) = Wav::of_any_rate(found.first.clone())?;
    let seconds = wav.frames as f64 / f64::from(rate);
    // Short of the track's end, since others may be shorter.
    let segment = if seconds > 2.0 * SEGMENT_S { SEGMENT_S } else { (seconds * 5.0).floor().max(1.0) / 10.0 };
    let mut file = Starter::new(job, "separation");
    match rate < LOW_RATE {
        true => file.lines(format_args!("network: {{ n_fft: 256, hop: 64, bands: 20 }} # for {rate} Hz\n")),
        false => file.lines("network: {} # 6 blocks of 256, for music at 44.1 kHz\n"),
    };
    file.lines("data:").lines(format_args!("  path: {}", yaml_scalar(&found.path.display().to_string())));
    let stems = found.stems.join(", ");
    file.lines(format_args!("  # {} tracks; the first is {seconds:.1} s long", found.tracks));
    file.lines(format_args!(
        "  stems: [{stems}] # in every track; the mixture is its mixture.wav, or else the sum of these stems"
    ));
    file.lines(format_args!("  sample_rate: {rate}\n  segment_seconds: {segment}"));
    let training = file.holdout(found.tracks);
    file.lines("");
    let saw = format!("{} tracks of {stems}", found.tracks);
    let segments = (training as f64 * seconds / segment) as u64;
    Ok(StarterFile { saw, text: file.train(job, segments) })
}
