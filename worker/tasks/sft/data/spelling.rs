//! A line as a chat, in the spellings that people have.
//!
//! | spelling | turns | images |
//! |---|---|---|
//! | Hugging Face | `messages: [{role, content}]` | pieces of type `image`: a path, or the next of `images` |
//! | ShareGPT | `conversations: [{from, value}]` | `<image>` in the text, paths in `images` |
//! | LLaVA | the same | the same, paths in `image` |
//!
//! `<image>` may stand in any text. Paths without a place for them come first in the first turn of the user.
//! Nothing else of a text is changed: a line break behind `<image>` stays.

use coxswain_models::vision_language::{Message, Piece, Role};
use serde_json::{Map, Value};

/// Stands for an image in a text.
const PLACE: &str = "<image>";

/// A chat, before anything of it is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chat {
    /// The turns.
    pub messages: Vec<Message>,
    /// Paths of images, in the order of their pieces.
    pub images: Vec<String>,
}

impl Chat {
    /// From a line; or what is wrong with it, and the remedy.
    pub fn parse(line: &str) -> Result<Self, String> {
        Self::parse_beside(line, Vec::new())
    }

    /// The same beside images of its own, which are the list of a chat that brings no paths.
    pub fn parse_beside(line: &str, beside: Vec<String>) -> Result<Self, String> {
        let value: Value =
            serde_json::from_str(line).map_err(|error| match line.trim_start().starts_with('[') {
                true => {
                    "begins a JSON list; write one chat a line, for instance with `jq -c '.[]'`".to_owned()
                }
                false => format!("is not JSON ({}); repair or remove the line", reason(&error)),
            })?;
        let Value::Object(fields) = value else {
            return Err("is not a JSON object; write one chat a line, for instance with `jq -c '.[]'`".into());
        };
        let mut images = Images::of(&fields, beside)?;
        let messages = match (fields.get("messages"), fields.get("conversations")) {
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
        if !messages.iter().any(|message| message.role == Role::Assistant) {
            return Err(
                "has no turn of the assistant, so there is nothing to learn; add one or remove the line"
                    .into(),
            );
        }
        images.placed(messages)
    }

    /// Images of the user, and what the assistant says of them.
    pub fn caption(text: &str, images: Vec<String>) -> Result<Self, String> {
        if text.is_empty() || images.is_empty() {
            return Err(
                "is a text without an image, or an image without a text; write the chat as .json".into()
            );
        }
        let user = Message { role: Role::User, pieces: images.iter().map(|_| Piece::Image).collect() };
        let answer = Message { role: Role::Assistant, pieces: vec![Piece::Text(text.to_owned())] };
        Ok(Self { messages: vec![user, answer], images })
    }

    /// A question to the assistant, whose text is spelled as in a line; or what is wrong with it.
    pub fn question(text: &str, images: Vec<String>) -> Result<Self, String> {
        let mut images = Images::from(images);
        let pieces = pieces_of(text, &mut images)?;
        images.placed(vec![Message { role: Role::User, pieces }])
    }
}

/// The paths of a line's images, as they find their places.
struct Images {
    /// Of the line's own list, those that have no place yet, first to last.
    open: std::vec::IntoIter<String>,
    listed: usize,
    /// Whether the list stands for one that the chat does not have: paths of its pieces replace it.
    assumed: bool,
    /// Those that have one.
    placed: Vec<String>,
}

impl From<Vec<String>> for Images {
    fn from(listed: Vec<String>) -> Self {
        Self { listed: listed.len(), open: listed.into_iter(), assumed: false, placed: Vec::new() }
    }
}

impl Images {
    fn of(fields: &Map<String, Value>, beside: Vec<String>) -> Result<Self, String> {
        if !["images", "image"].iter().any(|key| fields.get(*key).is_some_and(|list| !list.is_null())) {
            return Ok(Self { assumed: true, ..Self::from(beside) });
        }
        let mut listed = Vec::new();
        for key in ["images", "image"] {
            match fields.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::Array(list)) => {
                    for entry in list {
                        listed.push(path_of(entry, key)?);
                    }
                }
                Some(one) => listed.push(path_of(one, key)?),
            }
        }
        Ok(Self::from(listed))
    }

    /// The next of the line's list takes a place.
    fn place_next(&mut self) -> Result<(), String> {
        let listed = self.listed;
        let path = self.open.next().ok_or_else(|| {
            format!("has more places for images than the {listed} paths of `images`; give a path for each")
        })?;
        self.placed.push(path);
        Ok(())
    }

    /// The chat, with images that have no place at all before the first text of the user.
    fn placed(mut self, mut messages: Vec<Message>) -> Result<Chat, String> {
        let open: Vec<String> = self.open.collect();
        let has_own = self.placed.len() > self.listed - open.len();
        if open.is_empty() || (self.assumed && has_own) {
            return Ok(Chat { messages, images: self.placed });
        }
        if open.len() != self.listed {
            return Err(format!(
                "lists {} images, and has places for {}; write `<image>` once for each",
                self.listed,
                self.listed - open.len()
            ));
        }
        let first = messages.iter().position(|message| message.role == Role::User);
        let first = first
            .ok_or("has images and no turn of the user to show them in; write `<image>` where they belong")?;
        // Pieces that bring their own paths before that turn keep their order.
        let before = messages[..first].iter().flat_map(|message| &message.pieces);
        let before = before.filter(|piece| **piece == Piece::Image).count();
        messages[first].pieces.splice(0..0, open.iter().map(|_| Piece::Image));
        self.placed.splice(before..before, open);
        Ok(Chat { messages, images: self.placed })
    }
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
                who.map_or("missing".to_owned(), |who| format!("{who:?}"))
            ))
        })?;
        let pieces = match given.get(content) {
            Some(Value::String(text)) => pieces_of(text, images),
            Some(Value::Array(pieces)) => {
                let pieces =
                    pieces.iter().map(|piece| piece_of(piece, images)).collect::<Result<Vec<_>, _>>();
                pieces.map(|pieces| pieces.into_iter().flatten().collect())
            }
            _ => Err(format!("`{content}` is neither a text nor a list of pieces; write it as one of them")),
        };
        Ok(Message { role, pieces: pieces.map_err(at)? })
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
            images.place_next()?;
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
                None | Some(Value::Null) => images.place_next()?,
                Some(own) => images.placed.push(path_of(own, kind)?),
            }
            Ok(vec![Piece::Image])
        }
        kind => Err(format!(
            "a piece is of type {}; only `text` and `image` are supported",
            kind.map_or("(none)".to_owned(), |kind| format!("`{kind}`"))
        )),
    }
}

/// The path that a piece or a list's entry gives: as text, or under `url` or `path`.
fn path_of(value: &Value, key: &str) -> Result<String, String> {
    let nested = || ["path", "url"].iter().find_map(|field| value.get(*field));
    let text = value.as_str().or_else(|| nested().and_then(Value::as_str));
    let text = text.ok_or_else(|| format!("`{key}` gives no path of an image; write the path as text"))?;
    let path = text.strip_prefix("file://").unwrap_or(text);
    if path.contains("://") || path.starts_with("data:") {
        let shown: String = path.chars().take(40).collect();
        return Err(format!(
            "`{key}` is {shown:?}, and images are read from files; store it, and give its path"
        ));
    }
    Ok(path.to_owned())
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
        let messages = messages.iter().map(|(role, pieces)| Message { role: *role, pieces: pieces.clone() });
        Chat { messages: messages.collect(), images: images.iter().map(|path| (*path).to_owned()).collect() }
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
            r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "\nWhat is it?"}]}, {"role": "assistant", "content": "A cat."}]}"#,
            r#"{"images": ["a.png"], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]}, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]}"#,
            r#"{"images": ["a.png"], "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}"#,
            r#"{"id": 3, "image": "a.png", "conversations": [{"from": "human", "value": "\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://a.png"}}, "\nWhat is it?"]}, {"role": "assistant", "content": "A cat."}]}"#,
        ];
        for line in lines {
            assert_eq!(Chat::parse(line), Ok(wanted.clone()), "{line}");
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
        for (line, wanted) in [
            ("{\"messages\": [".to_owned(), "is not JSON (EOF while parsing a list at character"),
            ("[".to_owned(), "write one chat a line"),
            ("[1]".to_owned(), "is not a JSON object"),
            ("{}".to_owned(), "neither `messages` nor `conversations`"),
            (says(r#"[{"role": "user", "content": "x"}]"#), "no turn of the assistant"),
            (says("[]"), "no turn of the assistant"),
            (says("3"), "`messages` is not a list"),
            (says(r#"[{"role": "bot", "content": "x"}]"#), "messages[0]: `role` is \"bot\"; expected system"),
            (says(&format!(r#"[{answer}, {{"role": "user"}}]"#)), "messages[1]: `content` is neither"),
            (
                says(&format!(r#"[{answer}, {{"role": "user", "content": "<image>"}}]"#)),
                "more places for images",
            ),
            (
                says(&format!(r#"[{answer}, {{"role": "user", "content": [{{"type": "video"}}]}}]"#)),
                "type `video`; only `text` and `image`",
            ),
            (
                format!(
                    r#"{{"images": ["a", "b"], "messages": [{{"role": "user", "content": "<image>"}}, {answer}]}}"#
                ),
                "lists 2 images, and has places for 1",
            ),
            (format!(r#"{{"images": ["a"], "messages": [{answer}]}}"#), "no turn of the user"),
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
