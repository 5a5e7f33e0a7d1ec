//! A source as text: what of it is code, what a comment, and what a literal.

/// What a piece of a source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Everything else.
    Code,
    /// From `//` to the end of the line, or between `/*` and `*/`.
    Comment,
    /// A string or a character.
    Literal,
}

/// A piece of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// What it is.
    pub kind: Kind,
    /// The line it begins in, from 1.
    pub line: usize,
    /// All of it.
    pub text: &'a str,
}

/// The pieces of a file of Rust (or of protobuf, which looks the same from here), in order.
pub fn pieces(source: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let (mut line, mut begun, mut at) = (1, 0, 0);
    while at < source.len() {
        let Some((kind, length)) = begins(source, at) else {
            at += source[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        for (kind, text) in [(Kind::Code, &source[begun..at]), (kind, &source[at..at + length])] {
            if !text.is_empty() {
                pieces.push(Piece { kind, line, text });
                line += text.matches('\n').count();
            }
        }
        at += length;
        begun = at;
    }
    if begun < source.len() {
        pieces.push(Piece { kind: Kind::Code, line, text: &source[begun..] });
    }
    pieces
}

/// What begins at `at` if that is not code, and how many bytes it takes.
fn begins(source: &str, at: usize) -> Option<(Kind, usize)> {
    let rest = &source[at..];
    let to = |end: &str, from: usize| rest[from..].find(end).map_or(rest.len(), |found| from + found);
    let after = |end: &str, from: usize| (to(end, from) + end.len()).min(rest.len());
    let follows_a_word = source[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    match rest.as_bytes() {
        [b'/', b'/', ..] => Some((Kind::Comment, to("\n", 0))),
        [b'/', b'*', ..] => Some((Kind::Comment, after("*/", 2))),
        [b'"', ..] => Some((Kind::Literal, quoted(rest, '"'))),
        [b'r', b'"' | b'#', ..] if !follows_a_word => {
            let hashes = rest[1..].len() - rest[1..].trim_start_matches('#').len();
            let is_raw = rest[1 + hashes..].starts_with('"');
            let end = format!("\"{}", "#".repeat(hashes));
            is_raw.then(|| (Kind::Literal, after(&end, 2 + hashes)))
        }
        [b'\'', b'\\', ..] => Some((Kind::Literal, quoted(rest, '\''))),
        // A lifetime has no second quote.
        [b'\'', ..] => {
            let inside = rest[1..].chars().next()?;
            let end = 1 + inside.len_utf8();
            rest[end..].starts_with('\'').then_some((Kind::Literal, end + 1))
        }
        _ => None,
    }
}

/// The length of a literal that `rest` begins with, both quotes included.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

/// The words of an identifier, in lower case: `MaxOpenFiles` and `MAX_OPEN_FILES` have the same three.
pub fn words(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    let mut letters = identifier.chars().peekable();
    while let Some(c) = letters.next() {
        let begins = c.is_uppercase()
            && (before.is_lowercase() || letters.peek().is_some_and(|next| next.is_lowercase()));
        if (begins || !c.is_alphanumeric()) && words.last().is_some_and(|word| !word.is_empty()) {
            words.push(String::new());
        }
        if let (true, Some(word)) = (c.is_alphanumeric(), words.last_mut()) {
            word.extend(c.to_lowercase());
        }
        before = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_told_from_code() {
        let source =
            "let a = '\"'; // it's \"x\"\nlet b: &'a str = \"// no\\\"\";\nr#\"/* \" */\"# /* c\n */ d";
        let of = |kind| {
            let pieces = pieces(source).into_iter().filter(move |piece| piece.kind == kind);
            pieces.map(|piece| (piece.line, piece.text)).collect::<Vec<_>>()
        };
        assert_eq!(of(Kind::Comment), [(1, "// it's \"x\""), (3, "/* c\n */")]);
        assert_eq!(of(Kind::Literal), [(1, "'\"'"), (2, "\"// no\\\"\""), (3, "r#\"/* \" */\"#")]);
        assert_eq!(pieces(source).iter().map(|piece| piece.text).collect::<String>(), source);
    }

    #[test]
    fn an_identifier_is_taken_apart_in_every_style() {
        assert_eq!(words("MaxOpenFiles"), words("MAX_OPEN_FILES"));
        assert_eq!(words("HTTPServer"), ["http", "server"]);
        assert_eq!(words("_a_card2"), ["a", "card2"]);
    }
}
