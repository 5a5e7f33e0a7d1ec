//! How large things are: fields of structs, methods of types, parameters of functions. And where a clock is
//! read.

use std::{collections::BTreeMap, path::Path};

use syn::{
    Fields, FnArg, ImplItem, Item, Pat, Signature, TraitItem, Type,
    visit::{self, Visit},
};

use crate::sources::Sources;

/// A named thing and its size.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size {
    /// `file: name`.
    pub place: String,
    /// How many.
    pub count: usize,
}

/// Fields of every struct.
pub fn fields(sources: &Sources) -> Vec<Size> {
    each(sources, |item| match item {
        Item::Struct(item) => match &item.fields {
            Fields::Named(fields) => vec![(item.ident.to_string(), fields.named.len())],
            Fields::Unnamed(fields) => vec![(item.ident.to_string(), fields.unnamed.len())],
            Fields::Unit => Vec::new(),
        },
        _ => Vec::new(),
    })
}

/// Methods that a type has of its own, over all files of the crate, and those of every trait. Types of one
/// name in different modules are told apart by the folder that they are in.
pub fn methods(sources: &Sources) -> Vec<Size> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let defined: BTreeMap<String, Vec<&Path>> = definitions(sources);
    for module in sources.modules.values() {
        for item in &module.items {
            let (name, count) = match item {
                Item::Impl(block) if block.trait_.is_none() => {
                    let Type::Path(of) = &*block.self_ty else { continue };
                    let Some(last) = of.path.segments.last() else { continue };
                    let methods = block.items.iter().filter(|item| matches!(item, ImplItem::Fn(_)));
                    (last.ident.to_string(), methods.count())
                }
                Item::Trait(item) => {
                    let methods = item.items.iter().filter(|item| matches!(item, TraitItem::Fn(_)));
                    (item.ident.to_string(), methods.count())
                }
                _ => continue,
            };
            let file = defined.get(&name).map_or(&*module.file, |files| nearest(files, &module.file));
            *counts.entry(format!("{}: {name}", file.display())).or_default() += count;
        }
    }
    counts.into_iter().map(|(place, count)| Size { place, count }).collect()
}

/// Files that define a type or trait of each name.
fn definitions(sources: &Sources) -> BTreeMap<String, Vec<&Path>> {
    let mut defined: BTreeMap<String, Vec<&Path>> = BTreeMap::new();
    for module in sources.modules.values() {
        for item in &module.items {
            let ident = match item {
                Item::Enum(item) => &item.ident,
                Item::Struct(item) => &item.ident,
                Item::Trait(item) => &item.ident,
                Item::Union(item) => &item.ident,
                _ => continue,
            };
            defined.entry(ident.to_string()).or_default().push(&module.file);
        }
    }
    defined
}

/// The file with the longest way in common with `to`.
fn nearest<'a>(files: &[&'a Path], to: &Path) -> &'a Path {
    let common = |file: &Path| {
        let same = file.components().zip(to.components()).take_while(|(a, b)| a == b).count();
        (file == to, same)
    };
    files.iter().copied().max_by_key(|file| common(file)).expect("a name is defined somewhere")
}

/// Parameters of every function, `self` not among them.
pub fn parameters(sources: &Sources) -> Vec<Size> {
    let typed = |signature: &Signature| {
        signature.inputs.iter().filter(|input| matches!(input, FnArg::Typed(_))).count()
    };
    each(sources, |item| signatures(item).into_iter().map(|of| (of.ident.to_string(), typed(of))).collect())
}

/// Parameters that are taken apart where they are declared, `(a, b): (A, B)`: two arguments that are counted
/// as one.
pub fn tuple_parameters(sources: &Sources) -> Vec<Size> {
    let is_tuple =
        |input: &&FnArg| matches!(input, FnArg::Typed(typed) if matches!(&*typed.pat, Pat::Tuple(_)));
    let of_one = |of: &Signature| (of.ident.to_string(), of.inputs.iter().filter(is_tuple).count());
    each(sources, |item| signatures(item).into_iter().map(of_one).filter(|(_, count)| *count > 0).collect())
}

/// Files that read a clock, and how often.
pub fn clocks(sources: &Sources) -> BTreeMap<String, usize> {
    let mut read = BTreeMap::new();
    for module in sources.modules.values() {
        let mut clocks = Clocks(0);
        module.items.iter().for_each(|item| clocks.visit_item(item));
        if clocks.0 > 0 {
            *read.entry(module.file.display().to_string()).or_default() += clocks.0;
        }
    }
    read
}

struct Clocks(usize);

impl<'ast> Visit<'ast> for Clocks {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut ends = path.segments.iter().rev().map(|segment| segment.ident.to_string());
        if ends.next().as_deref() == Some("now")
            && ends.next().is_some_and(|of| of == "Instant" || of == "SystemTime")
        {
            self.0 += 1;
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, of: &'ast syn::Macro) {
        let text = of.tokens.to_string().replace(' ', "");
        self.0 += text.matches("Instant::now").count() + text.matches("SystemTime::now").count();
    }
}

fn each(sources: &Sources, counts: impl Fn(&Item) -> Vec<(String, usize)>) -> Vec<Size> {
    let modules = sources.modules.values();
    let items = modules.flat_map(|module| module.items.iter().map(move |item| (&module.file, item)));
    let sized = items.flat_map(|(file, item)| {
        let named = counts(item).into_iter();
        named.map(move |(name, count)| Size { place: format!("{}: {name}", file.display()), count })
    });
    sized.collect()
}

/// Signatures of an item's functions, those inside of functions included. A trait's implementation has the
/// trait's parameters: only the trait is asked about them, if it is ours, and nothing can be done if it is
/// not.
fn signatures(item: &Item) -> Vec<&Signature> {
    struct Signatures<'a>(Vec<&'a Signature>);
    impl<'ast> Visit<'ast> for Signatures<'ast> {
        fn visit_signature(&mut self, signature: &'ast Signature) {
            self.0.push(signature);
        }
    }
    let mut found = Signatures(Vec::new());
    match item {
        Item::Impl(block) if block.trait_.is_some() => {}
        item => found.visit_item(item),
    }
    found.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::tests::made_of;

    fn of(sized: Vec<Size>, place: &str) -> Option<usize> {
        sized.into_iter().find(|sized| sized.place == place).map(|sized| sized.count)
    }

    #[test]
    fn methods_of_one_type_add_up_over_files_and_types_of_one_name_do_not() {
        let sources = made_of(&[
            ("src/lib.rs", "mod a; mod b;"),
            (
                "src/a/mod.rs",
                "mod c; pub struct Place; impl Place { fn one(&self) {} } trait T { fn t(&self); }",
            ),
            (
                "src/a/c.rs",
                "use super::Place; impl Place { fn two(&self) {} fn three(&self) {} } impl T for Place { fn t(&self) {} }",
            ),
            ("src/b.rs", "pub struct Place; impl Place { fn one(&self) {} }"),
        ]);
        let found = methods(&sources);
        assert_eq!(of(found.clone(), "src/a/mod.rs: Place"), Some(3));
        assert_eq!(of(found.clone(), "src/b.rs: Place"), Some(1));
        assert_eq!(of(found, "src/a/mod.rs: T"), Some(1));
    }

    #[test]
    fn fields_and_parameters_are_counted() {
        let sources = made_of(&[(
            "src/lib.rs",
            "struct S { a: u8, b: u8 } struct T(u8, u8, u8); impl S { fn f(&self, a: u8, (b, c): (u8, u8)) {} }",
        )]);
        assert_eq!(of(fields(&sources), "src/lib.rs: S"), Some(2));
        assert_eq!(of(fields(&sources), "src/lib.rs: T"), Some(3));
        assert_eq!(of(parameters(&sources), "src/lib.rs: f"), Some(2));
        assert_eq!(of(tuple_parameters(&sources), "src/lib.rs: f"), Some(1));
    }

    #[test]
    fn a_clock_is_found_in_expressions_and_macros_and_not_in_comments() {
        let text = "// Instant::now()\nfn f() { std::time::Instant::now(); info!(at = SystemTime::now()); map(Instant::now); }";
        let sources = made_of(&[("src/lib.rs", text)]);
        assert_eq!(clocks(&sources)["src/lib.rs"], 3);
    }
}
