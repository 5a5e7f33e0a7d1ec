//! Every frame of every clip, bit for bit.

use coxswain_video::{Colour, DecoderPool, Layout, Moov, Picture, Plane, Video, VideoIndex};

use crate::fixtures::{clip, clips, colours, crcs, path, read};

#[test]
fn planes_and_rgb_are_ffmpegs() {
    let pool = DecoderPool::new(2);
    for clip in clips() {
        let video = clip.open();
        let frames: Vec<usize> = (0..clip.frames.len()).collect();
        pool.decode(&video, &frames, &mut |place, picture| {
            let picture = picture.unwrap();
            assert_eq!(picture.colour, clip.colour, "{} frame {place}", clip.file);
            assert_eq!(crcs(picture), clip.frames[place].crcs, "{} frame {place}", clip.file);
        });
    }
}

#[test]
fn tables_of_contents_are_ffmpegs() {
    let clips = clips();
    assert_eq!(clips.len(), 22);
    for clip in clips {
        let video = clip.open();
        let index = video.index();
        let message = (index.codec, index.width, index.height, index.timescale, index.frames());
        let expected = (clip.codec, clip.width, clip.height, clip.timescale, clip.frames.len());
        assert_eq!(message, expected, "{}", clip.file);
        for (n, frame) in clip.frames.iter().enumerate() {
            assert_eq!(index.ticks(n), Some(frame.ticks), "{} frame {n}", clip.file);
        }
        assert_eq!(index.ticks(clip.frames.len()), None);
    }
}

#[test]
fn keyframes_are_where_the_encoder_was_told_to_put_them() {
    let keys = |file: &str| -> Vec<usize> {
        let video = clip(file).open();
        let index = video.index();
        let is_keyframe = |&frame: &usize| {
            index.sample_of(frame).is_some_and(|sample| index.samples()[sample as usize].start == sample)
        };
        (0..index.frames()).filter(is_keyframe).collect()
    };
    assert_eq!(keys("av1_g2.mp4"), (0..20).step_by(2).collect::<Vec<_>>());
    assert_eq!(keys("h264_g12_b.mp4"), [0, 12, 24]);
    // 30 frames, then 17 of the second part, then the first part again.
    assert_eq!(keys("h264_joined.mp4"), [0, 12, 24, 30, 42, 47, 59, 71]);
}

#[test]
fn a_kept_table_gives_the_same_video() {
    let bytes = read("h264_joined.mp4");
    let moov = Moov::read(&bytes).unwrap();
    let kept = Moov::from_bytes(&moov.to_bytes()).unwrap();
    assert_eq!(kept, moov);
    assert!(moov.to_bytes().len() < 16 * 77 + 1024, "{} bytes", moov.to_bytes().len());
    let index = VideoIndex::new(&kept, 0).unwrap();
    assert_eq!(index.frames(), 77);
    assert_eq!(index.bytes(), 77 * 20);
}

#[test]
fn a_file_on_disk_is_read_by_ranges() {
    let video = Video::open(&path("tracks.mp4")).unwrap();
    let clip = clip("tracks.mp4");
    let pool = DecoderPool::new(1);
    for frame in [11, 0, 5] {
        pool.decode(&video, &[frame], &mut |_, picture| {
            assert_eq!(crcs(picture.unwrap()), clip.frames[frame].crcs)
        });
    }
}

#[test]
fn colours_are_swscales() {
    let data = read("colours.bin");
    for line in colours() {
        let number = |n: usize| line[n].parse::<usize>().unwrap();
        let (matrix, full_range, width, height) = (number(2) as u16, number(3) == 2, number(4), number(5));
        let (layout, within) = match line[1].as_str() {
            "yuv420p" => (Layout::Yuv420, 0),
            "yuv422p" => (Layout::Yuv422, 0),
            _ => (Layout::Yuv444, 1),
        };
        let (cw, ch) = (layout.chroma_width(width), layout.chroma_height(height));
        let (y, rest) = data[number(6)..].split_at(width * height);
        let (u, rest) = rest.split_at(cw * ch);
        let (v, rest) = rest.split_at(cw * ch);
        let planes = [(y, width), (u, cw), (v, cw)].map(|(samples, stride)| Plane { samples, stride });
        let picture = Picture { width, height, layout, colour: Colour { matrix, full_range }, planes };
        let off =
            picture.to_rgb().iter().zip(rest).map(|(ours, theirs)| ours.abs_diff(*theirs)).max().unwrap();
        assert!(off <= within, "{line:?}: {off}");
    }
}
