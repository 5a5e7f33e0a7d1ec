//! Which pictures are decoded for which wishes, and how much stays open.

use coxswain_video::{Counts, DecoderPool, Fault};

use crate::fixtures::{Clip, Numbers, clip, clips, crcs};

/// Asks for frames and checks each; counts what was done for them.
fn ask(pool: &DecoderPool, clip: &Clip, frames: &[usize]) -> Counts {
    let before = pool.counts();
    let mut seen = vec![0; frames.len()];
    pool.decode(&clip.open(), frames, &mut |place, picture| {
        seen[place] += 1;
        assert_eq!(
            crcs(picture.unwrap()),
            clip.frames[frames[place]].crcs,
            "{} {frames:?} at {place}",
            clip.file
        );
    });
    assert!(seen.iter().all(|&times| times == 1), "each wish is answered once: {seen:?}");
    let after = pool.counts();
    Counts {
        opened: after.opened - before.opened,
        seeks: after.seeks - before.seeks,
        decoded: after.decoded - before.decoded,
        skipped: after.skipped - before.skipped,
        shown: after.shown - before.shown,
    }
}

#[test]
fn random_access_gives_the_frames_of_reading_through() {
    let mut numbers = Numbers(7);
    let pool = DecoderPool::new(3);
    for clip in clips() {
        let video = clip.open();
        for _ in 0..40 {
            let frame = numbers.below(clip.frames.len());
            pool.decode(&video, &[frame], &mut |_, picture| {
                assert_eq!(crcs(picture.unwrap()), clip.frames[frame].crcs, "{} frame {frame}", clip.file);
            });
        }
        let batch: Vec<usize> = (0..25).map(|_| numbers.below(clip.frames.len())).collect();
        ask(&pool, &clip, &batch);
    }
}

#[test]
fn a_batch_decodes_each_picture_once() {
    let clip = clip("av1_g2.mp4");
    let counts = ask(&DecoderPool::new(1), &clip, &[7, 3, 6, 7, 2, 3]);
    assert_eq!(counts, Counts { opened: 1, seeks: 2, decoded: 4, skipped: 0, shown: 6 });
    // A keyframe alone needs nothing else.
    assert_eq!(ask(&DecoderPool::new(1), &clip, &[8]).decoded, 1);
}

#[test]
fn pictures_that_nothing_refers_to_are_passed_over() {
    let clip = clip("h264_g12_b.mp4");
    let all: Vec<usize> = (0..12).collect();
    let through = ask(&DecoderPool::new(1), &clip, &all);
    assert_eq!((through.decoded, through.skipped), (12, 0));
    let last = ask(&DecoderPool::new(1), &clip, &[11]);
    assert!(last.skipped >= 4, "{last:?}");
    assert_eq!(last.decoded + last.skipped, 12);
}

#[test]
fn neighbours_go_on_where_a_decoder_stands() {
    let clip = clip("h264_g12_b.mp4");
    let video = clip.open();
    let pool = DecoderPool::new(2);
    for frame in 0..12 {
        pool.decode(&video, &[frame], &mut |_, picture| {
            assert_eq!(crcs(picture.unwrap()), clip.frames[frame].crcs)
        });
    }
    // Frames come out of order in the file, so some need a second begin; far fewer than twelve.
    assert!(pool.counts().seeks <= 8, "{:?}", pool.counts());
    let pool = DecoderPool::new(2);
    for frames in [[0, 4], [8, 11]] {
        pool.decode(&video, &frames, &mut |_, picture| assert!(picture.is_ok()));
    }
    assert_eq!(pool.counts().seeks, 1);
}

#[test]
fn no_more_decoders_are_open_than_allowed() {
    let clips = clips();
    let videos: Vec<_> = clips.iter().map(Clip::open).collect();
    let mut numbers = Numbers(3);
    let pool = DecoderPool::new(3);
    for _ in 0..120 {
        let (video, clip) = {
            let n = numbers.below(videos.len());
            (&videos[n], &clips[n])
        };
        let frame = numbers.below(clip.frames.len());
        pool.decode(video, &[frame], &mut |_, picture| {
            assert_eq!(crcs(picture.unwrap()), clip.frames[frame].crcs)
        });
        assert!(pool.open_count() <= 3);
    }
    assert_eq!(pool.open_count(), 3);
}

#[test]
fn a_decoder_is_begun_again_for_files_of_the_same_size() {
    let (one, other) = (clip("av1_g2.mp4").open(), clip("av1_joined.mp4").open());
    let pool = DecoderPool::new(1);
    for n in 0..10 {
        for video in [&one, &other] {
            pool.decode(video, &[n], &mut |_, picture| assert!(picture.is_ok()));
        }
    }
    assert_eq!((pool.counts().opened, pool.open_count()), (1, 1));
}

#[test]
fn a_frame_beyond_the_last_is_an_error_of_its_own() {
    let clip = clip("av1_g2.mp4");
    let video = clip.open();
    let got = DecoderPool::new(1).rgb(&video, &[3, 20, 4]);
    assert_eq!(got.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    let error = got[1].clone().unwrap_err();
    assert_eq!((error.frame, &error.fault), (Some(20), &Fault::NoSuchFrame { frames: 20 }));
    assert!(error.to_string().starts_with("av1_g2.mp4, frame 20: the file has 20 frames"), "{error}");
}
