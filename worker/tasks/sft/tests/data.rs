//! Files of chats, sound and broken.

use super::*;
use coxswain_models::families::shelf;

const ANSWER: &str = r#"{"role": "assistant", "content": "Yes."}"#;

fn chat(question: &str) -> String {
    format!(r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {ANSWER}]}}"#)
}

/// A file of these lines, in a directory with one picture.
fn file(lines: &[String]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    fs::copy(assets().join("shapes/images/red-circle-0.png"), dir.path().join("a.png")).expect("it ships");
    fs::write(dir.path().join("broken.png"), b"\x89PNG\r\n\x1a\n truncated").expect("a file");
    let path = dir.path().join("chats.jsonl");
    fs::write(&path, lines.join("\n")).expect("a file");
    (dir, path)
}

fn refused(lines: &[String]) -> String {
    let (_dir, path) = file(lines);
    let error = Chats::open(&spec(&path, &[]), shelf()).err().expect("it is refused");
    let text = error.to_string();
    assert!(text.contains("chats.jsonl"), "{text}");
    text
}

#[test]
fn what_can_be_known_before_training_names_file_line_and_remedy() {
    let with_image = |path: &str| {
        format!(r#"{{"image": "{path}", "messages": [{{"role": "user", "content": "x"}}, {ANSWER}]}}"#)
    };
    let sound = || chat("Sound?");
    let cases = [
        (vec![], "0 chats, of which none is left to train on; write one chat a line"),
        (vec![sound(), String::new(), "{\"messages\":".into()], "chats.jsonl:3: is not JSON"),
        (
            vec![sound(), r#"{"messages": [{"role": "user", "content": "x"}]}"#.into()],
            "chats.jsonl:2: has no turn of the assistant, so there is nothing to learn; add one or remove the line",
        ),
        (vec![with_image("a.png"), with_image("b.png")], "chats.jsonl:2: there is no image"),
    ];
    for (lines, wanted) in cases {
        let found = refused(&lines);
        assert!(found.contains(wanted), "{found}");
    }
    let (_dir, path) = file(&[sound()]);
    fs::write(&path, b"\xff\xfe").expect("a file");
    let found = Chats::open(&spec(&path, &[]), shelf()).err().expect("it is refused").to_string();
    assert!(found.contains("chats.jsonl:1: is not UTF-8"), "{found}");
    let folder = path.parent().expect("it has one");
    let found = Chats::open(&spec(folder, &[]), shelf()).err().expect("it is refused").to_string();
    assert!(found.contains("is a folder; name the file of lines in it, or its tar shards"), "{found}");
}

#[test]
fn the_fingerprint_covers_lines_and_sizes_of_images_wherever_they_lie() {
    let lines =
        [format!(r#"{{"image": "a.png", "messages": [{{"role": "user", "content": "x"}}, {ANSWER}]}}"#)];
    let of = |path: &Path| Chats::open(&spec(path, &[]), shelf()).expect("sound").fingerprint();
    let ((dir, path), (_other, elsewhere)) = (file(&lines), file(&lines));
    let found = of(&path);
    assert_eq!(found, of(&elsewhere));
    fs::copy(dir.path().join("broken.png"), dir.path().join("a.png")).expect("it ships");
    assert_ne!(found, of(&path));
}

#[test]
fn what_only_shows_when_a_chat_is_encoded_is_that_chats_own_fault() {
    let with_image = |path: &str| {
        format!(r#"{{"image": "{path}", "messages": [{{"role": "user", "content": "x"}}, {ANSWER}]}}"#)
    };
    let long = chat(&"word ".repeat(400));
    let placeholder = chat("<|image_pad|>");
    let lines = [chat("Sound?"), with_image("broken.png"), long, placeholder, with_image("a.png")];
    let (_dir, path) = file(&lines);
    let chats = Chats::open(&spec(&path, &[("data.max_tokens", json!(64))]), shelf())
        .expect("known before training: nothing");
    for (index, wanted) in [
        (1, "chats.jsonl:2: "),
        (1, "does not decode"),
        (2, "chats.jsonl:3: has no answer within its first 64 tokens"),
        (3, "remove <|image_pad|>"),
    ] {
        let error = chats.read(index).expect_err("it is at fault");
        assert!(matches!(error, DataError::Line { .. }), "{error:?}");
        assert!(error.to_string().contains(wanted), "{error}");
        let row = chats.damaged_row(index, &error);
        assert_eq!((row.row, row.begin, row.end), (index, index, index + 1));
    }
    assert!(chats.read(0).is_ok() && chats.read(4).is_ok());
}

#[test]
fn a_chat_that_is_too_long_loses_its_end() {
    let (_dir, path) = file(&[chat("Sound?")]);
    let whole = Chats::open(&spec(&path, &[]), shelf()).expect("sound").sample(0).expect("sound");
    let tokens = whole.input_ids.len();
    let cut = Chats::open(&spec(&path, &[("data.max_tokens", json!(tokens - 2))]), shelf())
        .expect("sound")
        .sample(0);
    let cut = cut.expect("a part of the answer is left");
    assert_eq!(cut.input_ids, whole.input_ids[..tokens - 2]);
    assert_eq!(cut.learned, whole.learned[..tokens - 2]);
}

#[test]
fn one_chat_of_so_many_is_held_out_and_the_fingerprint_is_the_files() {
    let lines: Vec<_> = (0..7).map(|number| chat(&format!("Number {number}?"))).collect();
    let (_dir, path) = file(&lines);
    let chats = Chats::open(&spec(&path, &[("data.holdout_every", json!(3))]), shelf()).expect("sound");
    assert_eq!(chats.holdout(), [2, 5]);
    assert_eq!((chats.len(), chats.training().len()), (7, 5));
    let (_dir, copy) = file(&lines);
    let same = Chats::open(&spec(&copy, &[]), shelf()).expect("sound");
    assert_eq!(same.fingerprint(), chats.fingerprint());
    let (_dir, other) = file(&lines[1..]);
    assert_ne!(Chats::open(&spec(&other, &[]), shelf()).expect("sound").fingerprint(), chats.fingerprint());
}

#[test]
fn chats_come_apart_as_the_engine_put_them_together() {
    let chats = Chats::open(&spec(&assets().join("shapes/chats.jsonl"), &[]), shelf()).expect("they ship");
    let read: Vec<Box<dyn Sample>> = (0..6).map(|index| chats.read(index).expect("sound")).collect();
    let batch = (&chats as &dyn Samples).batch(Step(1), &read);
    let apart = chats.take_apart(&*batch);
    assert!(read.iter().zip(&apart).all(|(a, b)| **a == **b) && apart.len() == 6);
}
