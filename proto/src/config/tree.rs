//! YAML text as a tree whose every key and value knows its place.
//!
//! Scalars keep their text: what a plain `1e-4` or `007` means is decided by the field that reads it. Anchors
//! and aliases are expanded. Tags, merge keys, keys that are not text, and more than one document are
//! refused: a run file needs none of them.

use std::{collections::HashMap, sync::Arc};

use granit_parser::{Event, Parser, ScalarStyle, Span};

use super::error::{ConfigError, Place, Problem};
use crate::limits::{MAX_CONFIG_DEPTH, MAX_CONFIG_NODES};

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) value: Value,
}

/// What a node holds.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Text; `plain` if it was written without quotes and may mean a number, a truth value or nothing.
    Scalar { text: String, plain: bool },
    /// A list.
    List(Vec<Node>),
    /// Keys in the order of the file, each once.
    Map(Vec<(MapKey, Node)>),
}

/// A key and where it stands.
#[derive(Clone, Debug)]
pub(super) struct MapKey {
    pub(super) text: String,
    pub(super) place: Place,
}

impl Node {
    /// Whether the node says "nothing": empty, `~` or `null`.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// The node at the dotted `path`, or the last one on the way to it.
    pub(super) fn nearest(&self, path: &str) -> &Self {
        let mut node = self;
        for part in path.split('.') {
            let next = match &node.value {
                Value::Map(entries) => {
                    entries.iter().find(|(key, _)| key.text == part).map(|(_, child)| child)
                }
                Value::List(items) => part.parse().ok().and_then(|i: usize| items.get(i)),
                Value::Scalar { .. } => None,
            };
            match next {
                Some(child) => node = child,
                None => break,
            }
        }
        node
    }
}

/// Parses one document of `text`; `name` stands for the file in places.
pub(super) fn parse(text: &str, name: &str) -> Result<Node, ConfigError> {
    let name: Arc<str> = name.into();
    let place = move |line, column| Place::File { name: Arc::clone(&name), line, column };
    Builder::new(text, place).document()
}

/// Parses the value of an override; every node's place is the override itself.
pub(super) fn parse_override(text: &str, place: &Place) -> Result<Node, ConfigError> {
    Builder::new(text, |_, _| place.clone()).document()
}

struct Builder<'a, P> {
    parser: Parser<'a, granit_parser::StrInput<'a>>,
    place: P,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

impl<'a, P: Fn(usize, usize) -> Place> Builder<'a, P> {
    fn new(text: &'a str, place: P) -> Self {
        Self { parser: Parser::new_from_str(text), place, anchors: HashMap::new(), nodes: 0 }
    }

    fn document(mut self) -> Result<Node, ConfigError> {
        let root = loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentStart(..) => {}
                Event::StreamEnd => {
                    // An empty text is an empty value: `key=` on the command line.
                    let value = Value::Scalar { text: String::new(), plain: true };
                    return Ok(Node { place: self.place_of(span), value });
                }
                other => break self.node(other, span, 0)?,
            }
        };
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::DocumentEnd => {}
                Event::StreamEnd => return Ok(root),
                _ => {
                    return Err(
                        self.refuse(span, "a second YAML document begins here; one file describes one run")
                    );
                }
            }
        }
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), ConfigError> {
        match self.parser.next_event() {
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => {
                let mark = error.marker();
                let place = (self.place)(mark.line(), mark.col() + 1);
                Err(ConfigError::one(Problem::new("", format!("not YAML: {}", error.info())).at(&place)))
            }
            None => Err(ConfigError::one(Problem::new("", "the YAML text ends too early"))),
        }
    }

    fn place_of(&self, span: Span) -> Place {
        (self.place)(span.start.line(), span.start.col() + 1)
    }

    fn refuse(&self, span: Span, message: &str) -> ConfigError {
        ConfigError::one(Problem::new("", message).at(&self.place_of(span)))
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, ConfigError> {
        if depth > MAX_CONFIG_DEPTH {
            return Err(self.refuse(span, &format!("nested more than {MAX_CONFIG_DEPTH} levels deep")));
        }
        if event.tag().is_some() {
            return Err(self.refuse(span, "YAML tags are not used in run files; write the bare value"));
        }
        self.count(1, span)?;
        let place = self.place_of(span);
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, _) => {
                (anchor, Value::Scalar { text: text.into_owned(), plain: style == ScalarStyle::Plain })
            }
            Event::SequenceStart(_, anchor, _) => (anchor, self.list(depth)?),
            Event::MappingStart(_, anchor, _) => (anchor, self.map(depth)?),
            Event::Alias(anchor) => {
                let Some(target) = self.anchors.get(&anchor).cloned() else {
                    return Err(self.refuse(span, "this alias refers to a value that contains it"));
                };
                self.count(size(&target), span)?;
                return Ok(target);
            }
            _ => return Err(self.refuse(span, "a value was expected here")),
        };
        let node = Node { place, value };
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn count(&mut self, more: usize, span: Span) -> Result<(), ConfigError> {
        self.nodes += more;
        if self.nodes > MAX_CONFIG_NODES {
            return Err(
                self.refuse(span, &format!("more than {MAX_CONFIG_NODES} values; is this the right file?"))
            );
        }
        Ok(())
    }

    fn list(&mut self, depth: usize) -> Result<Value, ConfigError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Value::List(items)),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, ConfigError> {
        let mut entries: Vec<(MapKey, Node)> = Vec::new();
        let mut places = HashMap::new();
        loop {
            let key = match self.next()? {
                (Event::MappingEnd, _) => return Ok(Value::Map(entries)),
                (Event::Scalar(text, ..), span) => {
                    MapKey { text: text.into_owned(), place: self.place_of(span) }
                }
                (_, span) => return Err(self.refuse(span, "a key must be plain text")),
            };
            if key.text == "<<" {
                let problem = Problem::new("", "merge keys (`<<`) are not supported; write the keys out");
                return Err(ConfigError::one(problem.at(&key.place)));
            }
            if let Some(first) = places.insert(key.text.clone(), key.place.clone()) {
                let message = format!("key `{}` is given twice; first at {first}", key.text);
                return Err(ConfigError::one(
                    Problem::new("", message).at(&key.place).help("remove one of them"),
                ));
            }
            let (event, span) = self.next()?;
            let child = self.node(event, span, depth + 1)?;
            entries.push((key, child));
        }
    }
}

fn size(node: &Node) -> usize {
    match &node.value {
        Value::Scalar { .. } => 1,
        Value::List(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|(_, child)| size(child)).sum::<usize>(),
    }
}
