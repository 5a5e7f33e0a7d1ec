//! An episode as one picture.

use coxswain_data::pictures;
use coxswain_survey::{episode, sheet};

use crate::sets::{recording, repository, with_videos};

#[test]
fn pictures_are_on_the_sheet_as_they_are_in_the_episode() {
    let dir = recording(|_, _, _| ());
    let preview = episode(dir.path(), 1, 3).unwrap();
    assert_eq!(
        (preview.title.as_str(), &preview.frames[..]),
        ("episode 1: put the block away", &[0, 4, 8][..])
    );
    let titles: Vec<_> = preview.plots.iter().map(|plot| plot.title.as_str()).collect();
    assert_eq!(titles, ["observation.state as recorded", "action as recorded"]);
    assert_eq!(preview.plots[1].series[1], [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let drawn = pictures::decode(&sheet(&preview)).unwrap();
    // Pictures of eight pixels are drawn 15 times larger, at the margin, below two lines of text. Frame 4 of
    // episode 1 is the second.
    let pixel = |x: usize, y: usize| &drawn.rgb[(y * drawn.width + x) * 3..][..3];
    let (x, y) = (12 + 120 + 6 + 60, 12 + 24 + 14 + 60);
    assert_eq!((pixel(x, y), pixel(x - 126, y)), (&[20; 3][..], &[16; 3][..]));
    assert_eq!(pixel(x, y - 55), [200; 3], "its bright rim");
}

#[test]
fn numbers_that_are_none_interrupt_a_line_and_break_nothing() {
    let dir = recording(|episode, frame, row| {
        if episode == 0 && frame == 2 {
            row.state = [f32::NAN, f32::INFINITY];
        }
        row.action = [5.0, 5.0];
    });
    let mut preview = episode(dir.path(), 0, 8).unwrap();
    assert!(pictures::decode(&sheet(&preview)).is_ok());
    preview.plots[0].series = vec![vec![f32::NAN; 6]];
    preview.strips.clear();
    assert!(pictures::decode(&sheet(&preview)).is_ok());
}

#[test]
fn videos_and_large_pictures_fit() {
    let dir = with_videos();
    let drawn = pictures::decode(&sheet(&episode(dir.path(), 2, 8).unwrap())).unwrap();
    assert!(drawn.width < 2000 && drawn.height > 2 * 96, "{} x {}", drawn.width, drawn.height);
    let mini = repository("configs/assets/metaworld-mini");
    let wrong = episode(&mini, 4, 8).unwrap_err().to_string();
    assert_eq!(wrong, "episode 4 does not exist (4 in all, numbered from 0)");
}
