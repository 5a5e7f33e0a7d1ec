//! Whole recordings taken apart: what is written, and what is refused before anything is.

use std::fs;

use coxswain_task::{ConvertJob, TaskError, TaskOn};
use hound::{SampleFormat, WavReader, WavSpec, WavWriter};

use super::*;
use crate::separation::data::CHANNELS;

const SPEC: WavSpec =
    WavSpec { channels: 2, sample_rate: 4000, bits_per_sample: 32, sample_format: SampleFormat::Float };

/// Two tones that are in and out of step, one on each side; `[channels, l]`.
fn tones(samples: usize) -> Vec<f32> {
    let tone = |at: usize, rate: f32| (at as f32 * rate).sin() * 0.3;
    let channel = |rate: f32| (0..samples).map(move |at| tone(at, rate));
    channel(0.11).chain(channel(0.47)).collect()
}

fn write(path: &Path, spec: WavSpec, signals: &[f32]) {
    let (mut writer, samples) = (WavWriter::create(path, spec).expect("a file"), signals.len() / CHANNELS);
    for at in 0..samples {
        for channel in 0..usize::from(spec.channels) {
            writer.write_sample(signals[channel * samples + at]).expect("a sample");
        }
    }
    writer.finalize().expect("a file");
}

/// The left channel.
fn left(path: &Path) -> Vec<f32> {
    let mut reader = WavReader::open(path).expect("written");
    assert_eq!(reader.spec(), SPEC);
    reader.samples::<f32>().step_by(CHANNELS).map(|sample| sample.expect("a sample")).collect()
}

fn convert(results: &Path, files: &[PathBuf], out: &Path) -> Result<Vec<Vec<PathBuf>>, TaskError> {
    let job = ConvertJob { spec: &spec(&[]), results, files, out };
    TaskOn::<Flex>::convert(&Separation, &job, &Default::default()).expect("it takes recordings apart")
}

/// The results of a run that has not trained.
fn results(dir: &Path) -> (UntrainedSeparator, PathBuf) {
    let (untrained, results) = (UntrainedSeparator::new(&[]), dir.join("run"));
    fs::create_dir(&results).expect("a folder");
    let layout = untrained.trainables.layout();
    let values = layout.initial_values(spec(&[]).run.seed);
    Objective::<Flex>::export(&untrained.objective, &results, layout, &values).expect("written");
    (untrained, results)
}

#[test]
fn stems_are_as_long_as_their_recording_and_are_what_the_network_makes_of_its_segments() {
    let dir = tempfile::tempdir().expect("a folder");
    let (untrained, results) = results(dir.path());
    // A segment has 1,000 samples, a step from one to the next 750.
    let lengths = [1000, 300, 2100];
    let files = lengths.map(|samples| dir.path().join(format!("of {samples}.wav")));
    lengths.iter().zip(&files).for_each(|(&samples, file)| write(file, SPEC, &tones(samples)));
    let out = dir.path().join("stems");
    let written = convert(&results, &files, &out).expect("sound");
    for ((samples, file), written) in lengths.iter().zip(&files).zip(&written) {
        let at = out.join(file.file_stem().expect("a name"));
        assert_eq!(written, &["plucks", "drums"].map(|stem| at.join(format!("{stem}.wav"))));
        assert!(written.iter().all(|path| left(path).len() == *samples), "{written:?}");
    }
    let heard = |mixture: &[f32], from: usize| -> Vec<f32> {
        let halves = mixture.chunks_exact(mixture.len() / CHANNELS);
        halves.flat_map(|half| half[from..].iter().take(1000).copied().collect::<Vec<_>>()).collect()
    };
    let estimate = |samples: usize, from: usize| {
        untrained.objective.estimates(&untrained.trainables, &heard(&tones(samples), from))
    };
    let near = |found: &[f32], wanted: &[f32]| relative_error(found, wanted) < 1e-6;
    // The drums' left channel is the third signal.
    assert!(near(&left(&written[0][1]), &estimate(1000, 0)[2]));
    assert!(near(&left(&written[1][1]), &estimate(300, 0)[2][..300]));
    let long = left(&written[2][1]);
    assert!(near(&long[..750], &estimate(2100, 0)[2][..750]));
    assert!(near(&long[1000..1100], &estimate(2100, 750)[2][250..350]));
    assert!(near(&long[1750..], &estimate(2100, 1100)[2][650..]));
    let (before, behind) = (&estimate(2100, 0)[2][750..], &estimate(2100, 750)[2][..250]);
    let between = |at: usize| (behind[at] * (at + 1) as f32 + before[at] * (250 - at) as f32) / 251.0;
    assert!(near(&long[750..1000], &(0..250).map(between).collect::<Vec<_>>()));
}

#[test]
fn recordings_that_cannot_be_used_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let (_, results) = results(dir.path());
    let out = dir.path().join("stems");
    let path = |name: &str| dir.path().join(name);
    write(&path("sound.wav"), SPEC, &tones(100));
    let refused = |results: &Path, files: &[PathBuf], words: [&str; 2]| {
        let message = convert(results, files, &out).expect_err("refused").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message} does not say {words:?}");
        assert!(!out.exists() || fs::read_dir(&out).expect("a folder").count() == 0);
    };
    write(&path("faster.wav"), WavSpec { sample_rate: 8000, ..SPEC }, &tones(100));
    refused(&results, &[path("sound.wav"), path("faster.wav")], ["faster.wav", "8000 Hz"]);
    write(&path("mono.wav"), WavSpec { channels: 1, ..SPEC }, &tones(100));
    refused(&results, &[path("mono.wav")], ["mono.wav", "two channels"]);
    refused(&results, &[path("none.wav")], ["none.wav", "No such file"]);
    refused(&results, &[path("sound.wav"), path("run/../sound.wav")], ["stems/sound", "another `--out`"]);
    refused(dir.path(), &[path("sound.wav")], ["the run is unfinished", "cox export"]);
    let mut broken = tones(100);
    broken[50] = f32::NAN;
    write(&path("broken.wav"), SPEC, &broken);
    refused(&results, &[path("broken.wav")], ["broken.wav", "contains NaN"]);
}
