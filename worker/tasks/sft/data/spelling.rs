//! A line as a chat, in the spellings that people have.
//!
//! | spelling | turns | images |
//! |---|---|---|
//! | Hugging Face | `messages: [{role, content}]` | pieces of type `image`: a path, or the next of `images` |
//! | ShareGPT | `conversations: [{from, value}]` | `<image>` in the text, paths in `images` |
//! | LLaVA | the same | the same, paths in `image` |
//!
//! `<image>` may stand in any text. Paths without a place for them come first in the first turn of the user.
//! Nothing else of a text is changed: a line break behind `<image>` stays. `system` beside the turns is the
//! first of them; a turn of the assistant with `loss: false`, `train: false` or `weight: 0` is shown and not
//! learned; an image may have a size (`images`). What else would change what is learned, and is not read, is
//! refused.

use coxswain_data::text::excerpt;
use coxswain_models::vision_language::{Message, Piece, Role};
use serde_json::{Map, Value};

use super::images::{ChatImage, Images};

/// Stands for an image in a text.
const PLACE: &str = "<image>";

/// A chat, before anything of it is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chat {
    /// The turns.
    pub messages: Vec<Message>,
    /// Images, in the order of their pieces.
    pub images: Vec<ChatImage>,
}

impl Chat {
    /// From a line; or what is wrong with it, and the remedy.
    pub fn parse(line: &str) -> Result<Self, String> {
        Self::parse_beside(line, Vec::new())
    }

    /// From a line beside images of its own, which are the list of a chat that brings no paths.
    pub fn parse_beside(line: &str, beside: Vec<String>) -> Result<Self, String> {
        let value: Value =
            serde_json::from_str(line).map_err(|error| match line.trim_start().starts_with('[') {
                true => {
                    "begins a JSON list; write one chat a line, for instance with `jq -c '.[]'`".to_owned()
                }
                false if line.trim() == "{" => {
                    "is the first line of an object; write one chat a line, for instance with `jq -c .`"
                        .to_owned()
                }
                false => format!("is not JSON ({}); repair or remove the line", reason(&error)),
            })?;
        refuse_unread(&value, &UNREAD)?;
        let Value::Object(fields) = value else {
            return Err("is not a JSON object; write one chat a line, for instance with `jq -c '.[]'`".into());
        };
        let mut images = Images::from_fields(&fields, beside)?;
        let mut messages = match (fields.get("messages"), fields.get("conversations")) {
            (Some(list), None) => messages_of(list, "messages", ["role", "content"], &mut images)?,
            (None, Some(list)) => messages_of(list, "conversations", ["from", "value"], &mut images)?,
            (None, None) => {
                return Err(
                    "has neither `messages` nor `conversations`; write the chat under one of them".into()
                );
            }
            (Some(_), Some(_)) => {
                return Err("has both `messages` and `conversations`; remove one of them".into());
            }
        };
        if !messages.iter().any(|message| message.learned) {
            return Err("has no assistant turn to learn from; add one or remove the line".into());
        }
        system_of(&fields, &mut messages)?;
        let images = images.placed(&mut messages)?;
        Ok(Self { messages, images })
    }

    /// Images of the user, and what the assistant says of them.
    pub fn caption(text: &str, images: Vec<String>) -> Result<Self, String> {
        if text.is_empty() || images.is_empty() {
            return Err(
                "is a text without an image, or an image without a text; write the chat as .json".into()
            );
        }
        let user = Message::new(Role::User, images.iter().map(|_| Piece::Image).collect());
        let answer = Message::new(Role::Assistant, vec![Piece::Text(text.to_owned())]);
        Ok(Self { messages: vec![user, answer], images: images.into_iter().map(ChatImage::from).collect() })
    }

    /// A question to the assistant, whose text is spelled as in a line; or what is wrong with it.
    pub fn question(text: &str, images: Vec<String>) -> Result<Self, String> {
        let mut images = Images::from(images);
        let pieces = pieces_of(text, &mut images)?;
        let mut messages = vec![Message::new(Role::User, pieces)];
        let images = images.placed(&mut messages)?;
        Ok(Self { messages, images })
    }
}

/// Keys of a line that say what is shown or learned and that are not read, each with what to do.
const UNREAD: [(&str, &str); 13] = [
    ("videos", "give some of their frames as `images`, or remove the line"),
    ("video", "give some of its frames as `images`, or remove the line"),
    ("audios", "write the transcript into the text, or remove the line"),
    ("audio", "write the transcript into the text, or remove the line"),
    ("objects", "write their names and boxes into the text, where the model is to read or say them"),
    ("tools", "write them into the system turn, as the model's template does"),
    ("rejected_response", "preferences are not trained on: remove it to train on the answer alone"),
    ("rejected", "preferences are not trained on: remove it to train on the chat alone"),
    ("chosen", "preferences are not trained on: write the chosen answer as the last turn"),
    ("kto_tag", "preferences are not trained on: remove it to train on the chat alone"),
    ("history", "write its turns at the beginning of the list of turns"),
    ("loss_mask", "write `\"loss\": false` into turns that are not to be learned"),
    ("channel", "losses are not reported by channel: remove it"),
];
/// Keys of a turn that say what is shown or learned and that are not read, each with what to do.
const UNREAD_OF_TURN: [(&str, &str); 3] = [
    ("tool_calls", "write the calls into the content, as the model's template does"),
    ("function_call", "write the call into the content, as the model's template does"),
    ("reasoning_content", "write the reasoning into the content if it is to be learned"),
];

/// Refuses what is not read, unless there is nothing in it.
fn refuse_unread(fields: &Value, unread: &[(&str, &str)]) -> Result<(), String> {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => matches!(text.trim(), "" | "[]" | "{}" | "null"),
        Value::Array(list) => list.iter().all(Value::is_null),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    let there = |(key, _): &&(&str, &str)| fields.get(key).is_some_and(|value| !is_empty(value));
    match unread.iter().find(there) {
        Some((key, remedy)) => Err(format!("has `{key}`, which is not read; {remedy}")),
        None => Ok(()),
    }
}

/// The system's text that stands beside the turns, as a turn before them.
fn system_of(fields: &Map<String, Value>, messages: &mut Vec<Message>) -> Result<(), String> {
    let text = match fields.get("system") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::String(text)) if text.is_empty() => return Ok(()),
        Some(Value::String(text)) => text,
        Some(_) => return Err("`system` is not a text; write it as one".into()),
    };
    if messages.first().is_some_and(|message| message.role == Role::System) {
        return Err("has both `system` and a system turn; remove one of them".into());
    }
    let pieces = vec![Piece::Text(text.clone())];
    messages.insert(0, Message { role: Role::System, pieces, learned: false });
    Ok(())
}

/// Whether a turn is learned: the assistant's are, unless `loss`, `train` or `weight` switches one off.
fn is_learned(message: &Value, role: Role) -> Result<bool, String> {
    let mut learned = role == Role::Assistant;
    for key in ["loss", "train", "weight"] {
        let given = match message.get(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Bool(given)) => *given,
            Some(number) if number.as_f64() == Some(0.0) => false,
            Some(number) if number.as_f64() == Some(1.0) => true,
            Some(other) => {
                return Err(format!(
                    "`{key}` is {}; write true or false, or 1 or 0",
                    excerpt(&other.to_string())
                ));
            }
        };
        if given && role != Role::Assistant {
            return Err(format!("`{key}` is true, but the turn is not the assistant's; remove the key"));
        }
        learned &= given;
    }
    Ok(learned)
}

fn messages_of(
    list: &Value,
    under: &str,
    [role, content]: [&str; 2],
    images: &mut Images,
) -> Result<Vec<Message>, String> {
    let Value::Array(list) = list else {
        return Err(format!("`{under}` is not a list; write the turns as one"));
    };
    let message = |(number, given): (usize, &Value)| {
        let at = |problem: String| format!("{under}[{number}]: {problem}");
        let who = given.get(role).and_then(Value::as_str);
        let role = who.and_then(role_named).ok_or_else(|| {
            at(format!(
                "`{role}` is {}; expected system, user (human), assistant (gpt) or tool",
                who.map_or("missing".to_owned(), |who| format!("{:?}", excerpt(who)))
            ))
        })?;
        refuse_unread(given, &UNREAD_OF_TURN).map_err(at)?;
        let pieces = match given.get(content) {
            Some(Value::String(text)) => pieces_of(text, images),
            Some(Value::Array(pieces)) => {
                let pieces =
                    pieces.iter().map(|piece| piece_of(piece, images)).collect::<Result<Vec<_>, _>>();
                pieces.map(|pieces| pieces.into_iter().flatten().collect())
            }
            _ => Err(format!("`{content}` is neither a text nor a list of pieces; write it as one of them")),
        };
        Ok(Message { role, pieces: pieces.map_err(at)?, learned: is_learned(given, role).map_err(at)? })
    };
    list.iter().enumerate().map(message).collect()
}

fn role_named(name: &str) -> Option<Role> {
    match name {
        "system" => Some(Role::System),
        "user" | "human" => Some(Role::User),
        "assistant" | "gpt" => Some(Role::Assistant),
        "tool" => Some(Role::Tool),
        _ => None,
    }
}

/// A text, cut where images stand in it.
fn pieces_of(text: &str, images: &mut Images) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    for (number, part) in text.split(PLACE).enumerate() {
        if number > 0 {
            images.place_next(None)?;
            pieces.push(Piece::Image);
        }
        if !part.is_empty() {
            pieces.push(Piece::Text(part.to_owned()));
        }
    }
    Ok(pieces)
}

fn piece_of(piece: &Value, images: &mut Images) -> Result<Vec<Piece>, String> {
    if let Some(text) = piece.as_str() {
        return pieces_of(text, images);
    }
    match piece.get("type").and_then(Value::as_str) {
        Some("text") => {
            let text = piece.get("text").and_then(Value::as_str);
            pieces_of(
                text.ok_or("a piece of type `text` has no `text`; write it, or remove the piece")?,
                images,
            )
        }
        Some(kind @ ("image" | "image_url")) => {
            let own = ["image", "path", "url", "image_url"].iter().find_map(|key| piece.get(*key));
            match own {
                None | Some(Value::Null) => images.place_next(Some(piece))?,
                Some(own) => images.place(own, piece, kind)?,
            }
            Ok(vec![Piece::Image])
        }
        kind => Err(format!(
            "a piece is of type {}; only `text` and `image` are supported",
            kind.map_or("(none)".to_owned(), |kind| format!("`{}`", excerpt(kind)))
        )),
    }
}

/// What a parser says, without the line number, which is always 1.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ")
        .next()
        .map_or_else(|| text.clone(), |cause| format!("{cause} at character {}", error.column()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Piece {
        Piece::Text(text.into())
    }

    fn chat(messages: &[(Role, Vec<Piece>)], images: &[&str]) -> Chat {
        let messages = messages.iter().map(|(role, pieces)| Message::new(*role, pieces.clone()));
        let images = images.iter().map(|path| ChatImage::from((*path).to_owned()));
        Chat { messages: messages.collect(), images: images.collect() }
    }

    #[test]
    fn three_spellings_say_the_same() {
        let wanted = chat(
            &[
                (Role::User, vec![Piece::Image, text("\nWhat is it?")]),
                (Role::Assistant, vec![text("A cat.")]),
            ],
            &["a.png"],
        );
        let lines = [
            r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "\nWhat is it?"}]},
                {"role": "assistant", "content": "A cat."}]}"#,
            r#"{"images": ["a.png"], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]}"#,
            r#"{"images": ["a.png"], "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}"#,
            r#"{"id": 3, "image": "a.png", "conversations": [{"from": "human", "value": "\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://a.png"}}, "\nWhat is it?"]},
                {"role": "assistant", "content": "A cat."}]}"#,
        ];
        for line in lines {
            assert_eq!(Chat::parse(line), Ok(wanted.clone()), "{line}");
        }
    }

    #[test]
    fn a_system_beside_the_turns_is_the_first_of_them() {
        let messages = r#"[{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]"#;
        let wanted = [
            (Role::System, vec![text("You are a pirate.")]),
            (Role::User, vec![text("Who?")]),
            (Role::Assistant, vec![text("A cat.")]),
        ];
        let line = format!(r#"{{"system": "You are a pirate.", "tools": "[]", "messages": {messages}}}"#);
        assert_eq!(Chat::parse(&line), Ok(chat(&wanted, &[])));
        for nothing in ["null", r#""""#] {
            let line = format!(r#"{{"system": {nothing}, "messages": {messages}}}"#);
            assert_eq!(Chat::parse(&line), Ok(chat(&wanted[1..], &[])), "{line}");
        }
        let both = r#"{"system": "x", "messages": [{"role": "system", "content": "y"}, {"role": "assistant", "content": "z"}]}"#;
        assert!(Chat::parse(both).unwrap_err().contains("`system` and a system turn"));
    }

    #[test]
    fn turns_that_are_switched_off_are_shown_and_not_learned() {
        let line = |first: &str, second: &str| {
            format!(
                r#"{{"messages": [{{"role": "user", "content": "a"{first}}},
                    {{"role": "assistant", "content": "b"{second}}},
                    {{"role": "assistant", "content": "c"}}]}}"#
            )
        };
        let learned = |text: &str| -> Vec<bool> {
            Chat::parse(text).expect(text).messages.iter().map(|message| message.learned).collect()
        };
        for off in [r#", "loss": false"#, r#", "train": false"#, r#", "weight": 0"#, r#", "weight": 0.0"#] {
            assert_eq!(learned(&line("", off)), [false, false, true], "{off}");
        }
        for on in ["", r#", "loss": true"#, r#", "train": true"#, r#", "weight": 1"#, r#", "loss": null"#] {
            assert_eq!(learned(&line(r#", "weight": 0"#, on)), [false, true, true], "{on}");
        }
        for (first, second, wanted) in [
            ("", r#", "weight": 0.5"#, "messages[1]: `weight` is 0.5; write true or false"),
            (r#", "loss": true"#, "", "messages[0]: `loss` is true, but the turn is not the assistant's"),
        ] {
            let found = Chat::parse(&line(first, second)).unwrap_err();
            assert!(found.contains(wanted), "{found}");
        }
    }

    #[test]
    fn what_would_change_what_is_learned_and_is_not_read_is_refused_by_its_key() {
        let messages = |more: &str| {
            format!(r#"[{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b"{more}}}]"#)
        };
        for (key, value) in [
            ("videos", r#"["v.mp4"]"#),
            ("audios", r#"["a.wav"]"#),
            ("objects", r#"{"ref": ["cube"], "bbox": [[1, 2, 3, 4]]}"#),
            ("tools", r#"[{"name": "weather"}]"#),
            ("rejected_response", r#""No.""#),
            ("kto_tag", "false"),
            ("history", r#"[["a", "b"]]"#),
            ("loss_mask", "[0, 1]"),
        ] {
            let found =
                Chat::parse(&format!(r#"{{"messages": {}, "{key}": {value}}}"#, messages(""))).unwrap_err();
            assert!(found.contains(&format!("has `{key}`, which is not read; ")), "{found}");
            for nothing in ["null", "[]", "{}", r#""""#] {
                let line = format!(r#"{{"messages": {}, "{key}": {nothing}}}"#, messages(""));
                assert!(Chat::parse(&line).is_ok(), "{line}");
            }
        }
        let called = format!(r#"{{"messages": {}}}"#, messages(r#", "tool_calls": [{"name": "weather"}]"#));
        // As OpenAI writes them, without any content.
        let alone = called.replace(r#""content": "b""#, r#""content": null"#);
        for line in [called, alone] {
            let found = Chat::parse(&line).unwrap_err();
            assert!(found.contains("messages[1]: has `tool_calls`"), "{found}");
        }
    }

    #[test]
    fn several_images_stand_where_the_text_says() {
        let line = r#"{"images": ["a", "b", "c"], "conversations": [{"from": "system", "value": "Look."},
            {"from": "human", "value": "<image>then <image><image>"}, {"from": "gpt", "value": ""}]}"#;
        let user = vec![Piece::Image, text("then "), Piece::Image, Piece::Image];
        let messages = [(Role::System, vec![text("Look.")]), (Role::User, user), (Role::Assistant, vec![])];
        assert_eq!(Chat::parse(line), Ok(chat(&messages, &["a", "b", "c"])));
    }

    #[test]
    fn a_question_is_spelled_as_a_turn_of_the_user() {
        let images = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
        let wanted = chat(&[(Role::User, vec![Piece::Image, text("Which?"), Piece::Image])], &["a", "b"]);
        assert_eq!(Chat::question("<image>Which?<image>", images(&["a", "b"])), Ok(wanted));
        let wanted = chat(&[(Role::User, vec![Piece::Image, text("Which?")])], &["a"]);
        assert_eq!(Chat::question("Which?", images(&["a"])), Ok(wanted));
        for (asked, paths) in [("<image>", &[][..]), ("<image>", &["a", "b"])] {
            assert!(Chat::question(asked, images(paths)).is_err(), "{asked} with {paths:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_a_remedy() {
        let says = |list: &str| format!(r#"{{"messages": {list}}}"#);
        let answer = r#"{"role": "assistant", "content": "x"}"#;
        let png = format!("iVBORw0KGgo{}=", "A/b+".repeat(1000));
        let long = "role".repeat(1000);
        for (line, wanted) in [
            (says(&format!(r#"[{{"role": "{long}", "content": "x"}}]"#)), "rolerole...\"; expected system"),
            (
                format!(
                    r#"{{"image": "{png}", "messages": [{{"role": "user", "content": "x"}}, {answer}]}}"#
                ),
                "`image` is \"iVBORw0KGgoA/b+A/b+A/b+A/b+A/b+A/b+A/b+A\", but images are read from files",
            ),
            ("{\"messages\": [".to_owned(), "is not JSON (EOF while parsing a list at character"),
            ("[".to_owned(), "write one chat a line"),
            ("[1]".to_owned(), "is not a JSON object"),
            ("{}".to_owned(), "neither `messages` nor `conversations`"),
            (says(r#"[{"role": "user", "content": "x"}]"#), "no assistant turn"),
            (says("[]"), "no assistant turn"),
            (says("3"), "`messages` is not a list"),
            (says(r#"[{"role": "bot", "content": "x"}]"#), "messages[0]: `role` is \"bot\"; expected system"),
            (says(&format!(r#"[{answer}, {{"role": "user"}}]"#)), "messages[1]: `content` is neither"),
            (
                says(&format!(r#"[{answer}, {{"role": "user", "content": "<image>"}}]"#)),
                "more image placeholders",
            ),
            (
                says(&format!(r#"[{answer}, {{"role": "user", "content": [{{"type": "video"}}]}}]"#)),
                "type `video`; only `text` and `image`",
            ),
            (
                format!(
                    r#"{{"images": ["a", "b"], "messages": [{{"role": "user", "content": "<image>"}}, {answer}]}}"#
                ),
                "lists 2 images, but has placeholders for 1",
            ),
            (format!(r#"{{"images": ["a"], "messages": [{answer}]}}"#), "no user turn"),
            (
                format!(
                    r#"{{"image": "https://a/b.png", "messages": [{{"role": "user", "content": "x"}}, {answer}]}}"#
                ),
                "images are read from files",
            ),
        ] {
            let found = Chat::parse(&line).expect_err(&line);
            assert!(found.contains(wanted), "{line}: {found}");
        }
    }
}
