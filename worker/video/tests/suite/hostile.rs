//! Files that were cut, damaged or made to hurt: frames or errors, within time and memory, and never a panic.

use std::path::Path;
use std::time::{Duration, Instant};

use coxswain_fuzz::Target;
use coxswain_video::{DecoderPool, Fault, Moov, Sample, Video, VideoError, VideoIndex};

use crate::fixtures::{Numbers, clip, clips, crcs, read};

/// Opens bytes and decodes all frames: how many came out, or why none.
fn decode(bytes: Vec<u8>) -> Result<usize, VideoError> {
    let file = |fault| VideoError { path: "x.mp4".into(), frame: None, fault };
    let moov = Moov::read(&bytes).map_err(file)?;
    let video = Video::with(Path::new("x.mp4"), Box::new(bytes), &moov, 0)?;
    let frames: Vec<usize> = (0..video.index().frames()).collect();
    let mut good = 0;
    DecoderPool::new(1).decode(&video, &frames, &mut |place, picture| match picture {
        Ok(_) => good += 1,
        Err(error) => {
            assert_eq!(error.frame, Some(frames[place]), "{error}");
            // It would be survived; none is known, and one that is met should be.
            assert!(!error.to_string().contains("panicked"), "{error}");
        }
    });
    Ok(good)
}

/// How many damaged files to try; more by hand with `COX_VIDEO_CASES`.
fn cases(usual: usize) -> usize {
    std::env::var("COX_VIDEO_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual)
}

fn quick(what: &str, begun: Instant) {
    assert!(begun.elapsed() < Duration::from_secs(20), "{what} took {:?}", begun.elapsed());
}

#[test]
fn a_file_cut_anywhere_is_an_error_or_fewer_frames() {
    for clip in clips() {
        let bytes = read(&clip.file);
        let mut numbers = Numbers(11);
        for _ in 0..cases(12) {
            let length = numbers.below(bytes.len());
            let begun = Instant::now();
            let cut = decode(bytes[..length].to_vec());
            assert!(
                cut.is_err() || length + 8 >= bytes.len(),
                "{} cut to {length} bytes: {cut:?}",
                clip.file
            );
            quick(&clip.file, begun);
        }
    }
}

#[test]
fn flipped_bytes_are_errors_or_frames() {
    for clip in clips() {
        let bytes = read(&clip.file);
        let mut numbers = Numbers(5);
        for case in 0..cases(12) {
            let mut damaged = bytes.clone();
            for _ in 0..1 + case % 8 {
                let at = numbers.below(damaged.len());
                damaged[at] = numbers.below(256) as u8;
            }
            let begun = Instant::now();
            drop(decode(damaged));
            quick(&clip.file, begun);
        }
    }
}

/// Tables alone, which are read in microseconds: an index holds some tens of bytes for each byte of them, as
/// one entry may stand for many frames, up to the limit.
#[test]
fn hostile_tables_are_refused_or_read_within_the_limit() {
    let moovs = clips().into_iter().map(|clip| Moov::read(&read(&clip.file)).unwrap().to_bytes());
    // Of a file of 2^56 bytes, a hole: one number stands for 1.7 billion samples.
    let moovs = moovs.chain([read("hole.moov")]);
    Target::new("mp4 tables", moovs).tries(5_000).holds(256 << 20, 64).check(|bytes| {
        let Ok(moov) = Moov::from_bytes(bytes) else { return };
        for track in 0..2 {
            drop(VideoIndex::new(&moov, track));
        }
    });
}

/// What the tables say stays true, so that all of it comes to the decoder.
#[test]
fn hostile_pictures_of_av1_are_errors_or_frames() {
    for (name, file) in [
        ("av1, keyframes", "av1_98x70.mp4"),
        ("av1, full range", "av1_full_range_709.mp4"),
        ("av1, groups", "av1_g2.mp4"),
    ] {
        let (bytes, video) = (read(file), clip(file).open());
        let ends = |sample: &Sample| sample.offset as usize + sample.size as usize;
        let samples = video.index().samples();
        let begin = samples.iter().map(|sample| sample.offset as usize).min().unwrap();
        let coded = begin..samples.iter().map(ends).max().unwrap();
        let target = Target::new(name, [bytes[coded.clone()].to_vec()]).tries(300).holds(1 << 20, 256);
        target.on_other_threads().check(|hostile| {
            let mut damaged = bytes.clone();
            let length = hostile.len().min(coded.len());
            damaged[coded.clone()][..length].copy_from_slice(&hostile[..length]);
            drop(decode(damaged));
        });
    }
}

/// The tables are a few hundred bytes, which flips over the whole file seldom meet.
#[test]
fn flipped_bytes_in_the_tables_are_errors_or_frames() {
    for clip in clips() {
        let bytes = read(&clip.file);
        let moov = bytes.windows(4).position(|kind| kind == b"moov").unwrap();
        let length = u32::from_be_bytes(bytes[moov - 4..moov].try_into().unwrap()) as usize;
        let mut numbers = Numbers(23);
        for case in 0..cases(60) {
            let mut damaged = bytes.clone();
            for _ in 0..1 + case % 3 {
                let at = moov + numbers.below(length - 4);
                damaged[at] = [0, 1, 127, 255, numbers.below(256) as u8][numbers.below(5)];
            }
            let begun = Instant::now();
            drop(decode(damaged));
            quick(&clip.file, begun);
        }
    }
}

#[test]
fn a_damaged_picture_costs_the_frames_that_need_it_and_no_others() {
    for (file, group) in [("av1_g2.mp4", 8..10), ("h264_baseline.mp4", 6..12)] {
        let clip = clip(file);
        let mut bytes = read(file);
        let video = clip.open();
        let sample = video.index().samples()[group.start];
        bytes[sample.offset as usize..][..sample.size as usize].fill(0xff);
        let moov = Moov::read(&bytes).unwrap();
        let video = Video::with(Path::new(file), Box::new(bytes), &moov, 0).unwrap();
        let frames: Vec<usize> = (0..clip.frames.len()).collect();
        DecoderPool::new(1).decode(&video, &frames, &mut |place, picture| match picture {
            Ok(picture) => {
                assert!(!group.contains(&place), "{file} frame {place}");
                assert_eq!(crcs(picture), clip.frames[place].crcs, "{file} frame {place}");
            }
            Err(error) => {
                assert!(group.contains(&place), "{error}");
                assert!(matches!(error.fault, Fault::Picture(_)), "{error}");
                assert!(
                    error.to_string().contains(&format!("{file}, frame {place}: damaged picture")),
                    "{error}"
                );
            }
        });
    }
}

/// Overwrites the 32-bit word that stands `after` bytes behind the name of the last box `kind`.
fn with_word(file: &str, kind: &[u8; 4], after: usize, value: u32) -> Vec<u8> {
    let mut bytes = read(file);
    let at = bytes.windows(4).rposition(|name| name == kind).unwrap() + 4 + after;
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    bytes
}

#[test]
fn tables_that_claim_more_than_the_file_holds_are_refused_before_memory_is_spent() {
    let file = "h264_g12_b.mp4";
    for (kind, after, value) in [
        (b"stsz", 8, u32::MAX),  // samples
        (b"stsz", 4, 1),         // all of one byte: the size table becomes a count
        (b"stsz", 12, u32::MAX), // bytes of the first
        (b"stsc", 4, u32::MAX),  // entries
        (b"stsc", 8, 7),         // first chunk
        (b"stsc", 12, 0),        // samples in a chunk
        (b"stts", 4, u32::MAX),  // entries
        (b"stts", 8, 3),         // samples
        (b"ctts", 4, u32::MAX),  // entries
        (b"stss", 8, 2),         // the first keyframe
        (b"stco", 8, u32::MAX),  // offset
        (b"elst", 4, u32::MAX),  // entries
        (b"mdhd", 12, 0),        // time scale
        (b"moov", 0, u32::MAX),  // size of the box inside
        (b"avc1", 24, u32::MAX), // width and height
        (b"avc1", 24, 0),        // none
    ] {
        let begun = Instant::now();
        let name = String::from_utf8_lossy(kind).into_owned();
        let decoded = decode(with_word(file, kind, after, value));
        assert!(matches!(decoded, Err(_) | Ok(0)), "{name} + {after} = {value}: {decoded:?}");
        quick(&name, begun);
    }
}

#[test]
fn a_frame_larger_than_the_track_says_is_refused() {
    for (file, kind) in [("h264_g12_b.mp4", b"avc1"), ("av1_g2.mp4", b"av01")] {
        let bytes = with_word(file, kind, 24, 32 << 16 | 32);
        assert!(matches!(decode(bytes), Err(_) | Ok(0)), "{file}");
    }
}

#[test]
fn no_bytes_and_noise_are_errors() {
    assert!(decode(Vec::new()).is_err());
    let mut numbers = Numbers(1);
    for length in [1, 7, 8, 16, 100, 4096] {
        assert!(decode((0..length).map(|_| numbers.below(256) as u8).collect()).is_err());
    }
    // Boxes without end: the smallest that is one, again and again.
    let error = decode([0, 0, 0, 8, b'f', b'r', b'e', b'e'].repeat(100_000)).unwrap_err();
    assert!(matches!(error.fault, Fault::Limit { .. }), "{error}");
    assert!(matches!(decode(vec![0; 1 << 16]).unwrap_err().fault, Fault::Container(_)));
}
