//! Chats in tar shards.

use super::*;
use crate::packing::pack;
use coxswain_models::families::shelf;

/// A picture that ships.
fn picture(name: &str) -> Vec<u8> {
    fs::read(assets().join("shapes/images").join(name)).expect("it ships")
}

/// A sample of a shard: what stands behind the key, and its content.
type Member = (&'static str, Vec<u8>);

fn chat(fields: &str, content: &str) -> Vec<u8> {
    let answer = r#"{"role": "assistant", "content": "Yes."}"#;
    format!(r#"{{{fields} "messages": [{{"role": "user", "content": {content}}}, {answer}]}}"#).into_bytes()
}

/// A shard of these samples, `000000`, `000001` and so on.
fn shard(samples: &[Vec<Member>]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("chats.tar");
    let members = samples.iter().enumerate().flat_map(|(number, sample)| {
        sample.iter().map(move |(ending, content)| (format!("train/{number:06}.{ending}"), &**content))
    });
    pack(&path, members);
    (dir, path)
}

#[test]
fn packed_chats_are_the_chats_of_the_file_bit_for_bit() {
    let file = assets().join("shapes/chats.jsonl");
    let loose =
        Chats::from_spec(&spec(&file, &[("data.holdout_every", json!(6))]), shelf()).expect("they ship");
    let text = fs::read_to_string(&file).expect("it ships");
    let dir = tempfile::tempdir().expect("a directory");
    let lines: Vec<&str> = text.lines().collect();
    let mut images = 0;
    for (shard, lines) in lines.chunks(100).enumerate() {
        let mut members = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            // A path's file is `red-circle-0.png`: what is beside the chat has the same ending.
            let mut line = (*line).to_owned();
            let images_of = Chat::parse(&line).expect("sound").images;
            let names: Vec<_> = images_of.into_iter().map(|image| image.path).collect();
            for (at, name) in names.iter().enumerate() {
                line = line.replacen(&format!("\"{name}\""), &format!("\"any/where.{at}.png\""), 1);
                members.push((format!("{number}.{at}.png"), picture(name.trim_start_matches("images/"))));
                images += 1;
            }
            members.push((format!("{number}.json"), line.into_bytes()));
        }
        let path = dir.path().join(format!("shapes-{shard:03}.tar"));
        pack(&path, members.iter().map(|(name, content)| (name.clone(), &**content)));
    }
    assert!(images > 200);
    let shards = dir.path().join("shapes-{000..002}.tar");
    let packed =
        Chats::from_spec(&spec(&shards, &[("data.holdout_every", json!(6))]), shelf()).expect("sound");
    assert_eq!((packed.len(), packed.holdout()), (loose.len(), loose.holdout()));
    for index in 0..packed.len() {
        assert_eq!(packed.sample(index).expect("sound"), loose.sample(index).expect("sound"), "{index}");
    }
    let told = packed.describe().expect("sound")[0].1.clone();
    assert!(told.starts_with("240 chats in 3 shards, ") && told.ends_with("one of 6 held out"), "{told}");
    let predicted = |path: &Path| {
        let spec = spec(path, &[]);
        let settings = SftSettings::from_spec(&spec).expect("its own");
        ChatOutline::from_settings(&spec, &settings, shelf()).expect("sound")
    };
    assert_eq!(predicted(&shards), predicted(&file));
}

#[test]
fn images_beside_a_chat_are_its_list_and_a_text_is_their_caption() {
    let red = picture("red-circle-0.png");
    let blue = picture("blue-square-1.png");
    let (_dir, path) = shard(&[
        vec![("json", chat("", "\"<image>and<image>\"")), ("0.png", red.clone()), ("1.png", blue.clone())],
        vec![
            ("json", chat(r#""images": ["0.png", "1.png"],"#, "\"<image>and<image>\"")),
            ("1.png", blue.clone()),
            ("0.png", red.clone()),
        ],
        vec![
            ("json", chat("", r#"[{"type": "image", "image": "1.png"}]"#)),
            ("0.png", red),
            ("1.png", blue.clone()),
        ],
        vec![("png", blue), ("txt", b"A blue square.\n".to_vec())],
        vec![("json", chat("", "\"No picture.\""))],
    ]);
    let chats = Chats::from_spec(&spec(&path, &[]), shelf()).expect("sound");
    let [listed, named, own, caption, none] =
        [0, 1, 2, 3, 4].map(|index| chats.sample(index).expect("sound"));
    assert_eq!((listed.input_ids, listed.pixel_values), (named.input_ids, named.pixel_values));
    assert_eq!((own.image_shapes.len(), &own.pixel_values), (1, &caption.pixel_values));
    assert_eq!((caption.image_shapes.len(), none.image_shapes.len()), (1, 0));
    let learned = caption.learned.iter().filter(|learned| **learned).count();
    assert!(learned > 3, "{learned} tokens of the caption are learned");
}

#[test]
fn what_is_wrong_in_a_shard_is_named_with_file_byte_and_remedy() {
    let image = || ("png", picture("red-circle-0.png"));
    for (sample, wanted) in [
        (vec![image()], ["has .png, but neither .json nor .txt", "add the chat"]),
        (vec![("json", b"{\"messages\":".to_vec())], ["is not JSON", "repair or remove"]),
        (vec![("json", b"\xff".to_vec())], ["is not UTF-8", "save the file as UTF-8"]),
        (vec![("txt", b"Alone.".to_vec())], ["a text without an image", "write the chat as .json"]),
        (
            vec![("json", chat(r#""image": "a.jpg","#, "\"x\"")), image()],
            ["there is no image a.jpg in the sample, which has .json, .png", "correct the name"],
        ),
        (
            vec![("json", chat(r#""images": ["a.png", "b.png"],"#, "\"x\"")), image()],
            ["a.png and b.png are both read from the sample's one .png file", "name its images KEY.0.jpg"],
        ),
        (
            vec![("json", chat(r#""image": "../../etc/passwd","#, "\"x\""))],
            ["there is no image ../../etc/passwd", "in the sample"],
        ),
    ] {
        let (_dir, path) = shard(&[vec![("json", chat("", "\"Sound.\""))], sample]);
        let error = Chats::from_spec(&spec(&path, &[]), shelf()).err().expect("it is refused").to_string();
        assert!(error.contains("chats.tar: `train/000001.") && error.contains(" at byte 1024: "), "{error}");
        assert!(wanted.iter().all(|part| error.contains(part)), "{error}");
    }
    let (_dir, path) = shard(&[vec![("json", chat("", "\"Sound.\""))]]);
    let error =
        Chats::from_spec(&spec(&path, &[("data.images", json!("/images"))]), shelf()).err().expect("refused");
    assert!(error.to_string().contains("data.images"), "{error}");
}

#[test]
fn a_damaged_image_of_a_shard_is_its_own_chats_fault() {
    let broken = b"\x89PNG\r\n\x1a\n truncated".to_vec();
    let (_dir, path) = shard(&[
        vec![("json", chat("", "\"<image>Sound?\"")), ("png", picture("red-circle-0.png"))],
        vec![("json", chat("", "\"<image>Sound?\"")), ("png", broken)],
    ]);
    let chats = Chats::from_spec(&spec(&path, &[]), shelf()).expect("known before training: nothing");
    chats.read(0).expect("sound");
    let error = chats.read(1).expect_err("damaged");
    assert!(error.to_string().contains("chats.tar: `train/000001.json` at byte"), "{error}");
    assert_eq!(chats.damaged_row(1, &error).row, 1);
    let read = |changed: &Path| Chats::from_spec(&spec(changed, &[]), shelf()).expect("sound").fingerprint();
    assert_eq!(read(&path), chats.fingerprint());
}
