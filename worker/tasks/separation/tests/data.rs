//! Tracks on disk: what is read, and what is refused.

use std::fs;

use hound::{SampleFormat, WavSpec, WavWriter};

use super::*;
use crate::{packing::pack, separation::data::SegmentSample};

const PLAIN: WavSpec =
    WavSpec { channels: 2, sample_rate: 4000, bits_per_sample: 16, sample_format: SampleFormat::Int };

/// A ramp of so many frames, the right channel its negative.
fn write(path: &Path, spec: WavSpec, frames: u32) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    let mut writer = WavWriter::create(path, spec).expect("a file");
    for frame in 0..frames {
        for channel in 0..spec.channels {
            let value = if channel == 0 { 1.0 } else { -1.0 } * (frame % 100) as f32 / 100.0;
            match spec.sample_format {
                SampleFormat::Float => writer.write_sample(value),
                SampleFormat::Int => {
                    writer.write_sample((value * (1i64 << (spec.bits_per_sample - 1)) as f32) as i32)
                }
            }
            .expect("a sample");
        }
    }
    writer.finalize().expect("a file");
}

/// Two tracks of two stems, 2,500 samples long.
fn tracks(dir: &Path) {
    for (track, stem) in [("b", "plucks"), ("b", "drums"), ("a", "plucks"), ("a", "drums")] {
        write(&dir.join(track).join(format!("{stem}.wav")), PLAIN, 2500);
    }
}

fn open(dir: &Path, changes: &[(&str, Value)]) -> Result<Tracks, DataError> {
    let changes = [&[("data.holdout_every", json!(0))], changes].concat();
    Tracks::from_spec(&read(dir, &changes).expect("a sound run"))
}

fn refusal(dir: &Path, changes: &[(&str, Value)]) -> String {
    open(dir, changes).err().expect("refused").to_string()
}

#[test]
fn segments_are_numbered_through_all_tracks_and_a_mixture_is_the_sum_of_its_stems() {
    let dir = tempfile::tempdir().expect("a folder");
    tracks(dir.path());
    let opened = open(dir.path(), &[]).expect("sound");
    assert_eq!((opened.len(), opened.holdout().len()), (4, 0), "two segments of 1,000 in each track");
    assert_eq!(open(dir.path(), &[("data.hop_seconds", json!(0.125))]).expect("sound").len(), 8);
    let SegmentSample { mixture, stems, .. } = opened.sample(3).expect("sound");
    assert_eq!((mixture.len(), stems.len()), (2000, 4000));
    assert_eq!((stems[1], stems[1001]), (327.0 / 32768.0, -327.0 / 32768.0));
    assert_eq!(mixture[7], stems[7] + stems[2007]);
    assert!(opened.sample(4).is_err());
    // One that is there is taken.
    for track in ["a", "b"] {
        write(&dir.path().join(track).join("mixture.wav"), PLAIN, 2500);
    }
    let given = open(dir.path(), &[]).expect("sound");
    let sample = given.sample(3).expect("sound");
    assert_eq!(sample.mixture[7], sample.stems[7]);
    assert!(given.fingerprint() != opened.fingerprint());

    let held_out = open(dir.path(), &[("data.holdout_every", json!(2))]).expect("sound");
    assert_eq!(held_out.holdout(), [2, 3], "the second track");
    assert_eq!(held_out.training().len(), 2);
}

#[test]
fn a_set_is_named_by_content_of_all_of_its_files() {
    let dir = tempfile::tempdir().expect("a folder");
    tracks(dir.path());
    let name = || open(dir.path(), &[]).expect("sound").fingerprint();
    let change = |name: &str, from: usize, to: usize| {
        let path = dir.path().join(name);
        let mut bytes = fs::read(&path).expect("a file");
        let end = bytes.len() - to;
        bytes[from..end].iter_mut().for_each(|byte| *byte ^= 1);
        fs::write(&path, bytes).expect("a file");
    };
    let before = name();
    change("b/drums.wav", 5000, 5043);
    assert!(before != name(), "of a short file every byte counts");
    for stem in ["plucks", "drums"] {
        write(&dir.path().join(format!("c/{stem}.wav")), PLAIN, 600_000);
    }
    let before = name();
    change("c/plucks.wav", 100 << 10, 100 << 10);
    assert!(before != name(), "another take of the same length, between the same silence");
    change("c/plucks.wav", 100 << 10, 100 << 10);
    assert!(before == name());
}

#[test]
fn files_of_every_usual_kind_have_the_same_values() {
    let kinds = [
        (16, SampleFormat::Int),
        (24, SampleFormat::Int),
        (32, SampleFormat::Int),
        (32, SampleFormat::Float),
    ];
    for (bits_per_sample, sample_format) in kinds {
        let dir = tempfile::tempdir().expect("a folder");
        for stem in ["plucks", "drums"] {
            let spec = WavSpec { bits_per_sample, sample_format, ..PLAIN };
            write(&dir.path().join(format!("a/{stem}.wav")), spec, 1000);
        }
        let sample = open(dir.path(), &[]).expect("sound").sample(0).expect("sound");
        assert!((sample.stems[70] - 0.7).abs() < 1e-4 && (sample.stems[1070] + 0.7).abs() < 1e-4);
    }
}

#[test]
fn what_cannot_be_trained_on_is_refused_with_the_file_and_a_remedy() {
    let refused = |break_it: &dyn Fn(&Path), changes: &[(&str, Value)], words: [&str; 3]| {
        let dir = tempfile::tempdir().expect("a folder");
        tracks(dir.path());
        break_it(dir.path());
        let message = refusal(dir.path(), changes);
        for word in words {
            assert!(message.contains(word), "{message} does not say {word}");
        }
    };
    let replace = |name: &'static str, spec: WavSpec, frames: u32| {
        move |dir: &Path| write(&dir.join(name), spec, frames)
    };
    let faster = WavSpec { sample_rate: 8000, ..PLAIN };
    refused(&replace("a/drums.wav", faster, 2500), &[], ["a/drums.wav", "8000 Hz", "resample"]);
    let mono = WavSpec { channels: 1, ..PLAIN };
    refused(&replace("b/plucks.wav", mono, 2500), &[], ["b/plucks.wav", "channels: 1", "two channels"]);
    refused(&replace("b/drums.wav", PLAIN, 2400), &[], ["b/drums.wav", "2400 samples", "one length"]);
    refused(&replace("b/mixture.wav", PLAIN, 2501), &[], ["b/mixture.wav", "2501 samples", "one length"]);
    refused(&|_| (), &[("data.segment_seconds", json!(2))], ["plucks.wav", "8000", "data.segment_seconds"]);
    let gone = |dir: &Path| fs::remove_file(dir.join("a/drums.wav")).expect("it was there");
    refused(&gone, &[], ["a: drums.wav", "does not exist", "data.stems"]);
    let text = |dir: &Path| fs::write(dir.join("a/drums.wav"), "no sound").expect("a file");
    refused(&text, &[], ["a/drums.wav", "header", "WAV"]);
    let empty =
        |dir: &Path| ["a", "b"].iter().for_each(|track| fs::remove_dir_all(dir.join(track)).expect("there"));
    refused(&empty, &[], ["0 tracks", "none left", "data.stems"]);
    let one = |dir: &Path| fs::remove_dir_all(dir.join("a")).expect("there");
    assert!(refused_keys(&[("data.holdout_every", json!(1))]).contains("data.holdout_every"));
    refused(&one, &[("data.stems", json!(["bass"]))], ["b: bass.wav", "does not exist", "data.stems"]);
}

#[test]
fn a_file_that_ends_early_takes_its_segments_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    tracks(dir.path());
    let path = dir.path().join("b/drums.wav");
    let bytes = fs::read(&path).expect("a file");
    fs::write(&path, &bytes[..bytes.len() - 4 * 1000]).expect("a file");
    let opened = open(dir.path(), &[]).expect("the header is sound");
    let told = format!(
        "{}: ends early (after 1500 of 2500 samples): segments past the end are left out; copy or write the file again",
        path.display()
    );
    assert_eq!(opened.warnings(), [told]);
    assert!(opened.sample(2).is_ok());
    let fault = opened.sample(3).expect_err("it is not there");
    assert!(matches!(fault, DataError::Sample { index: 3, .. }));
    let message = fault.to_string();
    assert!(
        message.contains("b/drums.wav")
            && message.contains("ends early")
            && message.contains("write the file"),
        "{message}"
    );
    let row = opened.damaged_row(3, &fault);
    assert_eq!((row.row, row.begin, row.end), (3, 3, 4));
}

#[test]
fn whole_numbers_in_a_file_of_floats_are_doubted_by_their_peak() {
    let dir = tempfile::tempdir().expect("a folder");
    tracks(dir.path());
    let opened = open(dir.path(), &[]).expect("sound");
    assert!(opened.doubts(&opened.sample(0).expect("sound")).is_empty());
    let spec = WavSpec { bits_per_sample: 32, sample_format: SampleFormat::Float, ..PLAIN };
    let mut writer = WavWriter::create(dir.path().join("a/drums.wav"), spec).expect("a file");
    for value in 0..2 * 2500 {
        writer.write_sample(value as f32).expect("a sample");
    }
    writer.finalize().expect("a file");
    let opened = open(dir.path(), &[]).expect("sound");
    let doubts = opened.doubts(&opened.sample(0).expect("it can be read"));
    let [("loud", told)] = &doubts[..] else { panic!("{doubts:?}") };
    let told = told.to_string();
    assert!(told.contains("drums.wav") && told.contains("a peak of 1999, but full scale is 1"), "{told}");
}

fn refused_keys(changes: &[(&str, Value)]) -> String {
    read(Path::new("none"), changes).expect_err("refused")
}

#[test]
fn keys_that_make_no_separator_are_refused_by_name() {
    for (key, value, remedy) in [
        ("network.n_fft", json!(63), "even"),
        ("network.hop", json!(17), "quarter"),
        ("network.bands", json!(34), "33 frequencies"),
        ("network.heads", json!(3), "network.hidden_dim"),
        ("data.stems", json!([]), "no stem"),
        ("data.stems", json!(["a", "a"]), "each once"),
        ("data.stems", json!(["mixture"]), "not `mixture`"),
        ("data.stems", json!(["a".repeat(55)]), "at most 54 letters"),
        ("data.segment_seconds", json!(0.001), "half of `network.n_fft`"),
        ("data.hop_seconds", json!(0), "above 0"),
    ] {
        let message = refused_keys(&[(key, value)]);
        assert!(message.contains(key) && message.contains(remedy), "{message}");
    }
    let nothing = [("loss.waveform", json!(0)), ("loss.spectrum", json!(0))];
    assert!(refused_keys(&nothing).contains("nothing would be learned"));
}

#[test]
fn tracks_of_shards_are_those_of_folders_bit_for_bit() {
    let dir = tempfile::tempdir().expect("a folder");
    tracks(dir.path());
    let folder = open(dir.path(), &[]).expect("sound");
    let file = |track: &str, stem: &str| {
        fs::read(dir.path().join(track).join(format!("{stem}.wav"))).expect("it is there")
    };
    let files: Vec<_> = [("a", "drums"), ("a", "plucks"), ("b", "drums"), ("b", "plucks")]
        .map(|(track, stem)| (format!("music/{track}.{stem}.wav"), file(track, stem)))
        .into();
    let path = dir.path().join("tracks.tar");
    let packed = |files: &[(String, Vec<u8>)]| {
        pack(&path, files.iter().map(|(name, content)| (name.clone(), &**content)));
        open(&path, &[])
    };
    let shards = packed(&files).expect("sound");
    assert_eq!(shards.len(), folder.len());
    for index in 0..shards.len() {
        assert_eq!(shards.sample(index).expect("sound"), folder.sample(index).expect("sound"), "{index}");
    }
    let fingerprint = shards.fingerprint();
    let mut changed = files.clone();
    changed[3].1[5000] ^= 1;
    assert_ne!(packed(&changed).expect("sound").fingerprint(), fingerprint);
    let missing = packed(&files[..3]).err().expect("refused").to_string();
    assert!(missing.contains("tracks.tar: `music/b.drums.wav` at byte"), "{missing}");
    assert!(missing.contains("plucks.wav is missing from the sample; add the file"), "{missing}");
    changed[2].1.truncate(30);
    let cut = packed(&changed).err().expect("refused").to_string();
    assert!(cut.contains("`music/b.drums.wav`") && cut.contains("write it as WAV"), "{cut}");
    changed[2].1 = files[2].1[..6000].to_vec();
    let short = packed(&changed).expect("its segments are left out");
    let [told] = &short.warnings()[..] else { panic!("{:?}", short.warnings()) };
    assert!(told.contains("tracks.tar, `music/b.drums.wav`") && told.contains(" of 2500 samples"), "{told}");
    assert_eq!(folder.warnings(), Vec::<String>::new());
    let fault = short.sample(3).expect_err("it ends early");
    assert!(matches!(&fault, DataError::Sample { index: 3, .. }), "{fault:?}");
    assert!(fault.to_string().contains("ends early"), "{fault}");
}
