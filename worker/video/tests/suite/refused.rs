//! What is not decoded is said by name, with what helps.

use std::path::Path;

use coxswain_video::{DecoderPool, Fault, Moov, Video};

use crate::fixtures::{path, read};

fn refusal(file: &str) -> String {
    match Video::open(&path(file)) {
        Ok(video) => DecoderPool::new(1).rgb(&video, &[0])[0].clone().unwrap_err().to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn other_codecs_and_formats_are_named_with_the_command_that_converts_them() {
    for (file, name) in [
        ("no_hevc.mp4", "HEVC (H.265) is not supported"),
        ("no_depth.mp4", "a depth map (HEVC, 12 bit grey)"),
        ("no_vp9.mp4", "VP9"),
        ("no_mpeg4.mp4", "MPEG-4 part 2"),
        ("no_h264_422.mp4", "H.264 with 4:2:2 chroma"),
        ("no_h264_10bit.mp4", "10-bit H.264"),
        ("no_h264_left_crop.mp4", "cropped at the left or top"),
        ("no_h264_interlaced.mp4", "interlaced H.264"),
        ("no_av1_10bit.mp4", "10-bit AV1"),
        ("no_fragments.mp4", "a fragmented mp4"),
    ] {
        let message = refusal(file);
        assert!(
            message.contains(file) && message.contains(name) && message.contains("`ffmpeg -i IN.mp4 "),
            "{message}"
        );
    }
}

#[test]
fn a_track_that_is_not_there_is_named() {
    let bytes = read("tracks.mp4");
    let moov = Moov::read(&bytes).unwrap();
    let error = Video::with(Path::new("t.mp4"), Box::new(bytes), &moov, 2).err().unwrap();
    assert_eq!(error.fault, Fault::NoSuchTrack { tracks: 2, track: 2 });
}

#[test]
fn a_missing_file_is_named() {
    let message = refusal("none.mp4");
    assert!(message.contains("none.mp4: cannot be read: "), "{message}");
}

#[test]
fn a_file_that_changed_is_refused() {
    let bytes = read("av1_g2.mp4");
    let moov = Moov::read(&bytes).unwrap();
    let longer = [bytes, vec![0]].concat();
    let error = Video::with(Path::new("a.mp4"), Box::new(longer), &moov, 0).err().unwrap();
    assert!(matches!(error.fault, Fault::Changed(_)), "{error}");
}

#[test]
fn what_stands_in_place_of_a_video_is_named_with_how_the_video_comes_there() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n";
    for (bytes, what, remedy) in [
        (&b""[..], "is empty, not a video", "download it again"),
        (pointer, "is a Git LFS pointer, not a video", "`git lfs pull`"),
        (b"\n<!DOCTYPE html><html>Log in</html>", "is a web page, not a video", "download it again"),
        (b"<?xml version=\"1.0\"?><Error>AccessDenied</Error>", "is a web page", "download it again"),
    ] {
        let message = Moov::read(&bytes.to_vec()).unwrap_err().to_string();
        assert!(message.contains(what) && message.contains(remedy), "{message}");
        assert!(!message.contains("ffmpeg"), "{message}");
    }
    let message = Moov::read(&b"no video at all".to_vec()).unwrap_err().to_string();
    assert!(message.contains("not a valid mp4 file"), "{message}");
}
