//! HTML of which nothing can be foreign: what stands in it as markup is written in this program's source,
//! everything else is escaped on its way in.

use coxswain_proto::human;

/// A piece of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Html(String);

impl Html {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// One element with a text in it.
    pub fn with_text(tag: &'static str, class: &'static str, text: &str) -> Self {
        let mut html = Self::new();
        html.element(tag, class, |html| html.text(text));
        html
    }

    /// Markup of this program's.
    pub fn markup(&mut self, markup: &'static str) {
        self.0.push_str(markup);
    }

    /// A text from anywhere.
    pub fn text(&mut self, text: &str) {
        for c in human::escaped(text).chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                other => self.0.push(other),
            }
        }
    }

    /// An element and what is in it.
    pub fn element(&mut self, tag: &'static str, class: &'static str, inner: impl FnOnce(&mut Self)) {
        self.0.push('<');
        self.0.push_str(tag);
        if !class.is_empty() {
            self.0.push_str(" class=\"");
            self.0.push_str(class);
            self.0.push('"');
        }
        self.0.push('>');
        inner(self);
        self.0.push_str("</");
        self.0.push_str(tag);
        self.0.push_str(">\n");
    }

    /// A bar as long as this part of the whole.
    pub fn bar(&mut self, class: &'static str, part: f64) {
        let percent = if part.is_finite() { (100.0 * part).clamp(0.0, 100.0) } else { 0.0 };
        self.0.push_str("<i class=\"bar ");
        self.0.push_str(class);
        self.0.push_str(&format!("\" style=\"width:{percent:.1}%\"></i>"));
    }

    /// A PNG picture; nothing if the text is not base64.
    pub fn picture(&mut self, base64: &str, alt: &str) {
        let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
        if base64.is_empty() || !base64.bytes().all(is_base64) {
            return;
        }
        self.0.push_str("<img src=\"data:image/png;base64,");
        self.0.push_str(base64);
        self.0.push_str("\" alt=\"");
        self.text(alt);
        self.0.push_str("\">");
    }

    /// Another piece behind this one.
    pub fn push(&mut self, piece: Self) {
        self.0.push_str(&piece.0);
    }

    /// Rows below a heading. Columns whose heading ends in `#` are of numbers.
    pub fn table(&mut self, head: &[&'static str], rows: &[Vec<Self>]) {
        let class = |column: usize| head.get(column).filter(|name| name.ends_with('#')).map_or("", |_| "n");
        self.element("div", "scroll", |html| {
            html.element("table", "", |html| {
                html.element("tr", "", |html| {
                    for (column, name) in head.iter().enumerate() {
                        html.element("th", class(column), |html| html.text(name.trim_end_matches('#')));
                    }
                });
                for row in rows {
                    html.element("tr", "", |html| {
                        for (column, cell) in row.iter().enumerate() {
                            html.element("td", class(column), |html| html.0.push_str(&cell.0));
                        }
                    });
                }
            });
        });
    }

    /// The drawing of our own chart, which escapes its texts itself.
    pub(super) fn drawing(&mut self, svg: super::chart::Svg) {
        self.0.push_str(&svg.0);
    }

    /// As it goes into a file.
    pub fn into_string(self) -> String {
        self.0
    }
}

/// A text as a piece of a page.
impl From<&str> for Html {
    fn from(text: &str) -> Self {
        let mut html = Self::new();
        html.text(text);
        html
    }
}

/// A text as a piece of a page.
impl From<String> for Html {
    fn from(text: String) -> Self {
        Self::from(&*text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_wherever_they_go() {
        let foreign = "<script>alert(\"x\")</script> & 'y'\u{1b}[2J";
        let mut html = Html::with_text("p", "lead", foreign);
        html.table(&["name", "value#"], &[vec![foreign.into(), "1".into()]]);
        html.picture("aGk=", foreign);
        html.picture("\" onload=\"alert(1)", "bad");
        let page = html.into_string();
        assert!(!page.contains("<script") && !page.contains("onload") && !page.contains('\u{1b}'), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 3);
        assert!(page.contains("<th class=\"n\">value</th>") && page.contains("<td class=\"n\">1</td>"));
    }

    #[test]
    fn bars_stay_within_their_cells() {
        let widths = [0.25, 7.0, -1.0, f64::NAN].map(|part| {
            let mut html = Html::new();
            html.bar("a", part);
            html.into_string()
        });
        let expected = ["25.0", "100.0", "0.0", "0.0"];
        assert!(widths.iter().zip(expected).all(|(bar, width)| bar.contains(&format!("width:{width}%"))));
    }
}
