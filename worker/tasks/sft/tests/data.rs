//! Files of chats, sound and broken.

use super::*;
use coxswain_models::families::shelf;

const ANSWER: &str = r#"{"role": "assistant", "content": "Yes."}"#;

fn chat(question: &str) -> String {
    format!(r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {ANSWER}]}}"#)
}

/// A chat with this answer.
fn answered(text: String) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "{text}"}}]}}"#
    )
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
    let error = Chats::from_spec(&spec(&path, &[]), shelf()).err().expect("it is refused");
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
        (vec![], "0 chats, none left to train on; write one chat a line"),
        (vec![sound(), String::new(), "{\"messages\":".into()], "chats.jsonl:3: is not JSON"),
        (
            vec![sound(), r#"{"messages": [{"role": "user", "content": "x"}]}"#.into()],
            "chats.jsonl:2: has no assistant turn to learn from; add one or remove the line",
        ),
        (vec![with_image("a.png"), with_image("b.png")], "chats.jsonl:2: there is no image"),
    ];
    for (lines, wanted) in cases {
        let found = refused(&lines);
        assert!(found.contains(wanted), "{found}");
    }
    let (_dir, path) = file(&[sound()]);
    for (bytes, wanted) in [(&b"\xff\xfe"[..], "is UTF-16; convert it"), (b"caf\xe9", "is not UTF-8")] {
        fs::write(&path, bytes).expect("a file");
        let found = Chats::from_spec(&spec(&path, &[]), shelf()).err().expect("it is refused").to_string();
        assert!(found.contains(&format!("chats.jsonl:1: {wanted}")), "{found}");
    }
    let folder = path.parent().expect("it has one");
    let found = Chats::from_spec(&spec(folder, &[]), shelf()).err().expect("it is refused").to_string();
    assert!(found.contains("is a folder; name the JSONL file in it, or its tar shards"), "{found}");
}

#[test]
fn the_fingerprint_covers_lines_and_sizes_of_images_wherever_they_lie() {
    let lines =
        [format!(r#"{{"image": "a.png", "messages": [{{"role": "user", "content": "x"}}, {ANSWER}]}}"#)];
    let of = |path: &Path| Chats::from_spec(&spec(path, &[]), shelf()).expect("sound").fingerprint();
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
    let placeholder = chat("<|image_pad|>");
    let lines = [chat("Sound?"), with_image("broken.png"), placeholder, with_image("a.png")];
    let (_dir, path) = file(&lines);
    let chats = Chats::from_spec(&spec(&path, &[("data.max_tokens", json!(64))]), shelf())
        .expect("known before training: nothing");
    for (index, wanted) in [(1, "chats.jsonl:2: "), (1, "does not decode"), (2, "remove <|image_pad|>")] {
        let error = chats.read(index).expect_err("it is at fault");
        assert!(matches!(error, DataError::Line { .. }), "{error:?}");
        assert!(error.to_string().contains(wanted), "{error}");
        let row = chats.damaged_row(index, &error);
        assert_eq!((row.row, row.begin, row.end), (index, index, index + 1));
    }
    assert!(chats.read(0).is_ok() && chats.read(3).is_ok());
}

#[test]
fn images_that_a_run_would_leave_out_are_told_when_chats_are_opened() {
    let with_image = |path: &str| {
        format!(r#"{{"image": "{path}", "messages": [{{"role": "user", "content": "x"}}, {ANSWER}]}}"#)
    };
    let names = ["a.png", "none.png", "gif.png", "broken.png"];
    let (dir, path) = file(&names.map(with_image));
    fs::write(dir.path().join("none.png"), b"").expect("a file");
    fs::write(dir.path().join("gif.png"), b"GIF89a\x01\0\x01\0\0\0\0;").expect("a file");
    let warnings = || Chats::from_spec(&spec(&path, &[]), shelf()).expect("one is sound").warnings();
    let [told] = &warnings()[..] else { panic!("{:?}", warnings()) };
    let wanted = ["chats.jsonl:2: none.png: the image has no bytes; restore", "3 of 4 checked chats"];
    assert!(wanted.iter().all(|part| told.contains(part)), "{told}");
    for name in ["none.png", "gif.png", "broken.png"] {
        fs::copy(dir.path().join("a.png"), dir.path().join(name)).expect("it ships");
    }
    assert_eq!(warnings(), Vec::<String>::new());
}

#[test]
fn a_chat_that_is_too_long_loses_its_end() {
    let (_dir, path) = file(&[chat("Sound?")]);
    let whole = Chats::from_spec(&spec(&path, &[]), shelf()).expect("sound").sample(0).expect("sound");
    let tokens = whole.input_ids.len();
    let cut = Chats::from_spec(&spec(&path, &[("data.max_tokens", json!(tokens - 2))]), shelf())
        .expect("sound")
        .sample(0);
    let cut = cut.expect("a part of the answer is left");
    assert_eq!(cut.input_ids, whole.input_ids[..tokens - 2]);
    assert_eq!(cut.learned, whole.learned[..tokens - 2]);
}

#[test]
fn of_a_text_of_megabytes_the_same_ids_are_kept_as_of_one_that_is_encoded_whole() {
    let (_dir, path) =
        file(&[answered("word and more ".repeat(1000)), answered("word and more ".repeat(200_000))]);
    let chats = Chats::from_spec(&spec(&path, &[("data.max_tokens", json!(64))]), shelf()).expect("sound");
    let [short, long] = [0, 1].map(|index| chats.sample(index).expect("its beginning is kept"));
    assert_eq!((&long.input_ids, &long.learned), (&short.input_ids, &short.learned));
    let whole = long.input_ids.len() + long.cut;
    assert!(long.input_ids.len() == 64 && whole < 64 * 300, "{whole} tokens were encoded");
}

/// A chat of these turns of the user, each of so many pictures and a question, and answers.
fn asked(pictures: &[usize]) -> String {
    let message = |count: &usize| {
        let question = "<image>".repeat(*count) + "Which?";
        format!(r#"{{"role": "user", "content": "{question}"}}, {ANSWER}"#)
    };
    let messages: Vec<_> = pictures.iter().map(message).collect();
    let images = vec![r#""a.png""#; pictures.iter().sum()].join(", ");
    format!(r#"{{"images": [{images}], "messages": [{}]}}"#, messages.join(", "))
}

#[test]
fn a_chat_whose_later_pictures_do_not_fit_ends_before_their_turn() {
    let (_dir, path) = file(&[asked(&[1, 4]), asked(&[1])]);
    let first = Chats::from_spec(&spec(&path, &[]), shelf()).expect("sound").sample(1).expect("sound");
    let most = first.input_ids.len() + 9;
    let chats = Chats::from_spec(&spec(&path, &[("data.max_tokens", json!(most))]), shelf()).expect("sound");
    let cut = chats.sample(0).expect("its first turn fits");
    assert_eq!((&cut.input_ids, &cut.learned), (&first.input_ids, &first.learned));
    assert_eq!((cut.image_shapes.len(), &cut.pixel_values), (1, &first.pixel_values));
    let doubts = chats.doubts(&cut);
    assert!(doubts[0].1.to_string().contains(&format!("{} too many: the end", cut.cut)), "{doubts:?}");
    assert!(cut.cut > 0 && chats.doubts(&chats.sample(1).expect("sound")).is_empty());
    let told = format!(
        "1 of 2 chats is longer than data.max_tokens = {most} and loses its end; raise data.max_tokens, or lower data.max_pixels"
    );
    assert_eq!(chats.warnings(), [told]);
}

#[test]
fn chats_that_lose_their_end_are_counted_once_and_of_many_some_are_looked_at() {
    let (long, short) = (answered("word ".repeat(40)), chat("Sound?"));
    let (_dir, path) = file(std::slice::from_ref(&short));
    let most = Chats::from_spec(&spec(&path, &[]), shelf())
        .expect("sound")
        .sample(0)
        .expect("sound")
        .input_ids
        .len();
    let warnings = |long_ones: usize, short_ones: usize| {
        let lines = [vec![long.clone(); long_ones], vec![short.clone(); short_ones]].concat();
        let (_dir, path) = file(&lines);
        Chats::from_spec(&spec(&path, &[("data.max_tokens", json!(most))]), shelf())
            .expect("sound")
            .warnings()
    };
    let told = |count: &str| {
        format!(
            "{count} chats are longer than data.max_tokens = {most} and lose their end; raise data.max_tokens, or lower data.max_pixels"
        )
    };
    assert_eq!(warnings(90, 30), [told("90 of 120")]);
    assert_eq!(warnings(600, 0), [told("about 600 of 600")]);
    assert_eq!(warnings(0, 3), Vec::<String>::new());
}

#[test]
fn an_answer_that_is_empty_is_told_by_its_line_and_learned() {
    let off = r#"{"messages": [{"role": "assistant", "content": "", "loss": false}, {"role": "assistant", "content": "Yes."}]}"#;
    let lines = [chat("Sound?"), answered(String::new()), off.to_owned(), answered(" \\n".to_owned())];
    let warnings = |lines: &[String]| {
        let (_dir, path) = file(lines);
        let chats = Chats::from_spec(&spec(&path, &[]), shelf()).expect("sound");
        assert!((0..chats.len()).all(|index| chats.sample(index).is_ok()));
        chats.warnings()
    };
    let [told] = &warnings(&lines)[..] else { panic!("one is expected") };
    let wanted = "chats.jsonl:2: has an empty assistant answer, like 1 more of 4 chats: the model would learn to say nothing; ";
    assert!(told.contains(wanted) && told.ends_with("`\"loss\": false`"), "{told}");
    assert_eq!(warnings(&[lines[0].clone(), lines[2].clone()]), Vec::<String>::new());
}

#[test]
fn chats_that_are_no_lines_are_told_with_the_command_that_makes_lines_of_them() {
    let pretty = |text: &str| {
        let value: Value = serde_json::from_str(text).expect("JSON");
        serde_json::to_string_pretty(&value).expect("JSON")
    };
    let list = format!("[{}, {}]", chat("a"), chat("b"));
    for (name, text, told) in [
        (
            "list.json",
            list.clone(),
            ":1: is not a JSON object; write one chat a line, for instance with `jq -c '.[]'`",
        ),
        (
            "list.json",
            pretty(&list),
            ":1: begins a JSON list; write one chat a line, for instance with `jq -c '.[]'`",
        ),
        (
            "pretty.jsonl",
            pretty(&chat("a")),
            ":1: is the first line of an object; write one chat a line, for instance with `jq -c .`",
        ),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(name);
        fs::write(&path, text).expect("a file");
        let error = Chats::from_spec(&spec(&path, &[]), shelf()).err().expect("it is refused").to_string();
        assert!(error.contains(&format!("{name}{told}")), "{error}");
    }
}

#[test]
fn chats_without_an_answer_that_fits_are_left_out_when_they_are_opened_and_counted() {
    let long = chat(&"word ".repeat(400));
    let lines = [chat("Sound?"), asked(&[16]), long, chat("Sound as well?")];
    let (_dir, path) = file(&lines);
    let open = |holdout: u64| {
        let keys = [("data.max_tokens", json!(64)), ("data.holdout_every", json!(holdout))];
        Chats::from_spec(&spec(&path, &keys), shelf())
    };
    let chats = open(0).expect("two of them fit");
    let trained: Vec<_> =
        (0..chats.training().len()).filter_map(|number| chats.training().get(number)).collect();
    assert_eq!(trained, [0, 3]);
    assert!(trained.iter().all(|index| chats.read(*index).is_ok()));
    let told = chats.describe().expect("the first can be read");
    assert!(told[0].1.contains("4 chats, none held out, 2 left out"), "{told:?}");
    let [warning] = &chats.warnings()[..] else { panic!("{:?}", chats.warnings()) };
    for part in ["chats.jsonl:2: has no answer within data.max_tokens (64)", "1 more of 4", "data.max_pixels"]
    {
        assert!(warning.contains(part), "{part:?} is not in: {warning}");
    }
    assert_eq!(
        open(3).expect("one trains").holdout(),
        [0u64; 0],
        "the third is neither trained on nor held out"
    );
    let (_dir, path) = file(&lines[1..3]);
    let error =
        Chats::from_spec(&spec(&path, &[("data.max_tokens", json!(64))]), shelf()).err().expect("none fits");
    assert!(error.to_string().contains("raise data.max_tokens"), "{error}");
}

#[test]
fn a_turn_that_is_switched_off_is_read_and_not_learned() {
    let messages = |off: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "a?"}}, {{"role": "assistant", "content": "No."{off}}}, {{"role": "user", "content": "b?"}}, {ANSWER}]}}"#
        )
    };
    let (_dir, path) = file(&[messages(""), messages(r#", "loss": false"#), messages(r#", "weight": 0"#)]);
    let chats = Chats::from_spec(&spec(&path, &[]), shelf()).expect("sound");
    let [both, second, other] = [0, 1, 2].map(|index| chats.sample(index).expect("sound"));
    assert_eq!((&second.input_ids, &second.learned), (&both.input_ids, &other.learned));
    let first = both.learned.iter().position(|learned| *learned).expect("two answers");
    assert!(!second.learned[first]);
    let last = both.learned.len() - 1;
    let of_last = |sample: &ChatSample| sample.learned.iter().rposition(|learned| *learned);
    assert!(of_last(&second) == of_last(&both) && last > first);
}

#[test]
fn the_size_that_a_chat_asks_for_an_image_is_obeyed_within_the_bounds_of_the_run() {
    let with = |size: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": [{{"type": "image", "image": "a.png"{size}}}]}}, {ANSWER}]}}"#
        )
    };
    let cell = 28 * 28;
    let lines = [
        with(""),
        with(&format!(r#", "max_pixels": {cell}"#)),
        with(r#", "resized_height": 56, "resized_width": 84"#),
        with(r#", "resized_height": 560000, "resized_width": 840000"#),
    ];
    let (_dir, path) = file(&lines);
    let bounds = [("data.min_pixels", json!(cell)), ("data.max_pixels", json!(8 * cell))];
    let chats = Chats::from_spec(&spec(&path, &bounds), shelf()).expect("sound");
    let shapes: Vec<_> = (0..4).map(|index| chats.sample(index).expect("sound").image_shapes[0]).collect();
    assert_ne!(shapes[0], [1, 2, 2]);
    assert_eq!((shapes[1], shapes[2]), ([1, 2, 2], [1, 4, 6]));
    assert!(shapes[3][1] * shapes[3][2] <= 4 * 8, "{shapes:?}");
    let spec = spec(&path, &bounds);
    let settings = SftSettings::from_spec(&spec).expect("its own");
    let outline = ChatOutline::from_settings(&spec, &settings, shelf()).expect("sound");
    assert!(shapes.contains(&outline.images[0]), "{:?}", outline.images);
    let error = refused(&[with(r#", "resized_height": 56"#)]);
    assert!(error.contains("only `resized_height` or `resized_width`; give both"), "{error}");
}

#[test]
fn one_chat_of_so_many_is_held_out_and_the_fingerprint_is_the_files() {
    let lines: Vec<_> = (0..7).map(|number| chat(&format!("Number {number}?"))).collect();
    let (_dir, path) = file(&lines);
    let chats = Chats::from_spec(&spec(&path, &[("data.holdout_every", json!(3))]), shelf()).expect("sound");
    assert_eq!(chats.holdout(), [2, 5]);
    assert_eq!((chats.len(), chats.training().len()), (7, 5));
    let (_dir, copy) = file(&lines);
    let same = Chats::from_spec(&spec(&copy, &[]), shelf()).expect("sound");
    assert_eq!(same.fingerprint(), chats.fingerprint());
    let (_dir, other) = file(&lines[1..]);
    assert_ne!(
        Chats::from_spec(&spec(&other, &[]), shelf()).expect("sound").fingerprint(),
        chats.fingerprint()
    );
}

#[test]
fn chats_come_apart_as_the_engine_put_them_together() {
    let chats =
        Chats::from_spec(&spec(&assets().join("shapes/chats.jsonl"), &[]), shelf()).expect("they ship");
    let read: Vec<Box<dyn Sample>> = (0..6).map(|index| chats.read(index).expect("sound")).collect();
    let batch = (&chats as &dyn Samples).batch(Step(1), &read);
    let apart = chats.take_apart(&*batch);
    assert!(read.iter().zip(&apart).all(|(a, b)| **a == **b) && apart.len() == 6);
}
