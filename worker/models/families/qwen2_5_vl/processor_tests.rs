//! Against Pillow, Transformers and their tokenizers: fixtures made by
//! `integration-tests/fixtures/make_data.py`.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde::Deserialize;

use super::Qwen2_5Vl;
use crate::{
    chatml::{ChatMlChats, ChatMlPrompts, ChatMlTokenizer, ModelFacts},
    pretrained::pictures::{ImageProcessor, PatchShape, PixelBounds, SmartResize, decode_sized},
    two_towers::family::TowersFamily,
    vision_language::{ChatEncoder, EncodedChat, Message, Piece, PromptEncoder, PromptForm, Role},
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures/data")
}

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets/tiny-vla")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn ints(bytes: &[u8]) -> Vec<usize> {
    let words = bytes.chunks_exact(8).map(|b| b.try_into().expect("8 bytes"));
    words.map(|b| i64::from_le_bytes(b) as usize).collect()
}

#[test]
fn preprocessed_pixels_are_transformers_own() {
    let bytes = std::fs::read(fixtures().join("images.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names: Vec<_> =
        file.names().into_iter().filter_map(|n| n.strip_suffix(".file").map(str::to_string)).collect();
    assert_eq!(names.len(), 9);
    for name in names {
        let tensor = |part: &str| file.tensor(&format!("{name}.{part}")).unwrap();
        let bounds = ints(tensor("bounds").data());
        let bounds = PixelBounds { min: Some(bounds[0]), max: Some(bounds[1]), ..PixelBounds::default() };
        let shape = PatchShape { patch: 14, merge: 2, frames: 2 };
        let processor = SmartResize::from_checkpoint(&model(), shape, bounds).unwrap();
        // The image's size is part of its name: anything_HxW.
        let size = name.rsplit('_').next().and_then(|s| s.split_once('x')).expect("a size");
        let size = (size.0.parse().unwrap(), size.1.parse().unwrap());
        let got = processor.process(decode_sized(tensor("file").data(), size).unwrap()).unwrap();
        assert_eq!(got.shape.map(|g| g as usize).to_vec(), ints(tensor("grid").data()), "{name}");
        // Both frames of a patch are the image's: of each channel the file has the first.
        let frames = floats(tensor("pixel_values").data());
        let want: Vec<_> = frames.chunks(14 * 14).flat_map(|frame| [frame, frame].concat()).collect();
        assert_eq!(got.pixel_values.len(), want.len(), "{name}");
        let square = |x: f32| f64::from(x) * f64::from(x);
        let off: f64 = got.pixel_values.iter().zip(&want).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = want.iter().map(|b| square(*b)).sum();
        let error = (off / norm).sqrt();
        // The bar is 1e-4; Pillow's arithmetic is repeated exactly, so all that may differ is the last bit of
        // a quotient.
        assert!(error < 1e-7, "{name}: relative error {error:e}");
    }
}

#[derive(Deserialize)]
struct Prompts {
    published_template: String,
    pad_token_id: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    text: String,
    image_tokens: Vec<u32>,
    input_ids: Vec<u32>,
}

fn form(images: usize, max_text_tokens: Option<usize>) -> PromptForm<'static> {
    PromptForm { template: "{task}", images, max_text_tokens }
}

#[test]
fn of_a_long_text_the_first_tokens_are_kept_and_nothing_else_is_touched() {
    let (facts, grids) = (ModelFacts::read(&model(), Qwen2_5Vl::FORM).unwrap(), [[1, 2, 6]]);
    let whole = ChatMlPrompts::from_checkpoint(&model(), facts, &form(1, None)).unwrap();
    let text = "put the red cube into the drawer, and then close it";
    let [all, none] = [text, ""].map(|text| whole.encode(text, &grids).unwrap());
    let (words, around) = (all.len() - none.len(), none.len());
    assert!(words > 4, "{words}");
    for most in [1, 4, words - 1, words, words + 1] {
        let limited = whole.like(&form(1, Some(most)));
        let ids = limited.encode(text, &grids).unwrap();
        let kept = words.min(most);
        assert_eq!((ids.len(), limited.cut(text)), (around + kept, words - kept), "{most}");
        let begin = all.iter().zip(&none).take_while(|(one, other)| one == other).count();
        assert_eq!(ids[..begin + kept], all[..begin + kept]);
        assert_eq!(ids[begin + kept..], none[begin..], "{most}");
    }
    assert_eq!(whole.cut(text), 0);
}

#[test]
fn prompts_are_encoded_as_transformers_encodes_them() {
    let text = std::fs::read_to_string(fixtures().join("prompts.json")).unwrap();
    let prompts: Prompts = serde_json::from_str(&text).unwrap();
    let own = model();
    let published = published(&prompts.published_template);
    let facts = ModelFacts::read(&own, Qwen2_5Vl::FORM).unwrap();
    for case in &prompts.cases {
        let model = if case.template == "own" { own.as_path() } else { published.path() };
        let encoder =
            ChatMlPrompts::from_checkpoint(model, facts, &form(case.image_tokens.len(), None)).unwrap();
        // A grid of one cell's height and as many cells as the image has tokens.
        let grids: Vec<[u32; 3]> = case.image_tokens.iter().map(|n| [1, 2, 2 * n]).collect();
        let ids = encoder.encode(&case.text, &grids).unwrap();
        assert_eq!(ids, case.input_ids, "{:?} with the {} template", case.text, case.template);
        assert_eq!(encoder.pad(), prompts.pad_token_id);
    }
}

#[derive(Deserialize)]
struct Chats {
    published_template: String,
    cases: Vec<ChatCase>,
}

#[derive(Deserialize)]
struct ChatCase {
    template: String,
    chat: Vec<(String, serde_json::Value)>,
    input_ids: Vec<u32>,
    mask: Vec<u8>,
}

fn message((role, content): &(String, serde_json::Value)) -> Message {
    let role = match role.as_str() {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => panic!("{other}"),
    };
    let piece = |piece: &serde_json::Value| match piece["type"].as_str() {
        Some("image") => Piece::Image,
        _ => Piece::Text(piece["text"].as_str().expect("text").into()),
    };
    let pieces = match content {
        serde_json::Value::Array(pieces) => pieces.iter().map(piece).collect(),
        text => vec![Piece::Text(text.as_str().expect("text").into())],
    };
    Message::new(role, pieces)
}

/// The tiny checkpoint with the published chat template instead of its own.
fn published(template: &str) -> tempfile::TempDir {
    let published = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "config.json"] {
        std::fs::copy(model().join(file), published.path().join(file)).unwrap();
    }
    let template = serde_json::json!({"chat_template": template});
    std::fs::write(published.path().join("chat_template.json"), template.to_string()).unwrap();
    published
}

#[test]
fn chats_are_encoded_and_masked_as_transformers_does_it() {
    let text = std::fs::read_to_string(fixtures().join("chats.json")).unwrap();
    let chats: Chats = serde_json::from_str(&text).unwrap();
    let (own, published) = (model(), published(&chats.published_template));
    let facts = ModelFacts::read(&own, Qwen2_5Vl::FORM).unwrap();
    let encoders =
        [own.as_path(), published.path()].map(|model| ChatMlChats::from_checkpoint(model, facts).unwrap());
    assert!(chats.cases.len() > 40);
    for case in &chats.cases {
        let encoder = &encoders[usize::from(case.template == "published")];
        let messages: Vec<_> = case.chat.iter().map(message).collect();
        let images =
            messages.iter().flat_map(|message| &message.pieces).filter(|piece| **piece == Piece::Image);
        // Grids of one token.
        let grids: Vec<_> = images.map(|_| [1, 2, 2]).collect();
        let EncodedChat { ids, learned } = encoder.encode(&messages, &grids).unwrap();
        assert_eq!(ids, case.input_ids, "{:?} with the {} template", case.chat, case.template);
        let mask: Vec<u8> = learned.into_iter().map(u8::from).collect();
        assert_eq!(mask, case.mask, "{:?} with the {} template", case.chat, case.template);
    }
}

#[test]
fn an_image_takes_as_many_tokens_as_it_has_and_none_of_them_is_learned() {
    let own = model();
    let encoder =
        ChatMlChats::from_checkpoint(&own, ModelFacts::read(&own, Qwen2_5Vl::FORM).unwrap()).unwrap();
    let says = Message::new;
    let chat = |pieces| [says(Role::User, pieces), says(Role::Assistant, vec![Piece::Text("Yes.".into())])];
    let pieces = vec![Piece::Image, Piece::Image, Piece::Text("Same?".into())];
    let one = encoder.encode(&chat(pieces.clone()), &[[1, 2, 2]; 2]).unwrap();
    let many = encoder.encode(&chat(pieces), &[[1, 4, 4], [1, 2, 6]]).unwrap();
    assert_eq!(many.ids.len(), one.ids.len() + 3 + 2);
    let learned = |chat: &EncodedChat| -> Vec<u32> {
        let ids = chat.ids.iter().zip(&chat.learned).filter(|(_, learned)| **learned);
        ids.map(|(id, _)| *id).collect()
    };
    assert_eq!(learned(&one), learned(&many));
    let shown = vec![Piece::Text("Yes".into()), Piece::Image, Piece::Text(".".into())];
    let shown = [says(Role::User, vec![Piece::Text("Same?".into())]), says(Role::Assistant, shown)];
    let shown = encoder.encode(&shown, &[[1, 2, 2]]).unwrap();
    let image = shown.ids.iter().position(|id| *id == encoder.image_token()).expect("it is in the answer");
    assert_eq!(shown.learned[image - 1..=image + 1], [false; 3], "what is shown is not written");
    assert_eq!(shown.learned[image - 2..=image + 2], [true, false, false, false, true]);
    let mistyped = encoder.encode(&chat(vec![Piece::Text("<|image_pad|>".into())]), &[]).unwrap_err();
    assert!(mistyped.contains("remove <|image_pad|> from text \"<|image_pad|>\""), "{mistyped}");
}

#[test]
fn a_hostile_tokenizer_is_refused_or_used() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "preprocessor_config.json", "tokenizer_config.json"] {
        std::fs::copy(model().join(name), dir.path().join(name)).unwrap();
    }
    let facts = ModelFacts::read(dir.path(), Qwen2_5Vl::FORM).unwrap();
    let sample = std::fs::read(model().join("tokenizer.json")).unwrap();
    // A token is a text, an entry of a table in both directions, and a node of its trie.
    coxswain_fuzz::Target::new("tokenizer.json", [sample]).tries(200).holds(64 << 20, 256).check(|bytes| {
        std::fs::write(dir.path().join("tokenizer.json"), bytes).unwrap();
        drop(ChatMlTokenizer::from_checkpoint(dir.path(), facts));
    });
}
