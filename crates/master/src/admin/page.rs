//! GET /: a page for people. Self-contained, renews itself, asks nothing of other hosts.

use std::fmt::Write as _;

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use mooncake_base::ByteSize;

use super::{
    Shared,
    segments::{Shown, status_name},
    summary::{Snapshot, rate, share},
};
use crate::service::{Service, VERSION, calls::Op};

/// Segments beyond this are summed up in one line.
const SEGMENTS_SHOWN: usize = 200;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;\
padding:0 1rem;color:#1c2733;background:#fff}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}\
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;\
border-bottom:1px solid #8883}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\
.bar{background:#8883;border-radius:3px;height:.8rem;min-width:8rem}.bar i{display:block;height:100%;\
border-radius:3px;background:#2f7ed8}.bar i.full{background:#d8572f}.muted{opacity:.65}\
@media(prefers-color-scheme:dark){body{color:#dfe6ee;background:#14191f}a{color:#7db4f0}}";

pub(super) async fn show(State(admin): Shared) -> Response {
    let (before, present) = admin.snapshots();
    let html = render(&admin.service, &before, &present);
    ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], html).into_response()
}

fn render(service: &Service, before: &Snapshot, present: &Snapshot) -> String {
    let t = &present.totals;
    let mut html = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=3>\
         <meta name=viewport content=\"width=device-width\"><title>mooncake master</title>\
         <style>{STYLE}</style><h1>mooncake master</h1>\
         <p class=muted>version {VERSION}, up {} s. <a href=/metrics>metrics</a> · \
         <a href=/metrics/summary>summary</a> · <a href=/health>health</a></p>",
        service.now().since(service.started()).as_secs(),
    );
    let _ = write!(
        html,
        "<h2>Pool</h2>{}<p>{} of {} used ({:.1} %), {} waiting for readers to finish. \
         {} objects, {} soft-pinned. {} clients, {} segments.</p>",
        bar(share(t.used, t.capacity)),
        ByteSize(t.used),
        ByteSize(t.capacity),
        share(t.used, t.capacity),
        ByteSize(t.fenced),
        t.keys,
        t.soft_pinned_keys,
        t.clients,
        t.segments,
    );
    segments(&mut html, service.segments().into_iter().map(Shown::new).collect());
    calls(&mut html, before, present);
    let c = &t.counters;
    let _ = write!(
        html,
        "<h2>Since the start</h2><p>{} objects evicted ({}). {} puts found no room, {} got fewer \
         copies than wished. {} unfinished puts displaced, {} taken back. {} clients expired.</p>",
        c.evicted_keys,
        ByteSize(c.evicted_bytes),
        c.puts_without_room,
        c.puts_with_fewer_copies,
        c.puts_displaced,
        c.puts_released,
        c.clients_expired,
    );
    html
}

fn segments(html: &mut String, segments: Vec<Shown>) {
    html.push_str(
        "<h2>Segments</h2><table><tr><th>Name<th>Endpoint<th>State<th class=n>Size<th>Used",
    );
    for shown in segments.iter().take(SEGMENTS_SHOWN) {
        let _ = write!(
            html,
            "<tr><td>{}<td>{}<td>{}<td class=n>{}<td>{}",
            escape(&shown.segment.name),
            escape(&shown.segment.endpoint),
            status_name(shown.status),
            ByteSize(shown.segment.length),
            bar(shown.percent()),
        );
    }
    html.push_str("</table>");
    if let Some(more) = segments.len().checked_sub(SEGMENTS_SHOWN).filter(|more| *more > 0) {
        let _ = write!(html, "<p class=muted>and {more} more</p>");
    }
}

fn calls(html: &mut String, before: &Snapshot, present: &Snapshot) {
    html.push_str(
        "<h2>Calls</h2><table><tr><th>Operation<th class=n>per second<th class=n>calls\
         <th class=n>of them batches<th class=n>failed",
    );
    for ((op, name, _), count) in Op::ALL.iter().zip(&present.counts) {
        let _ = write!(
            html,
            "<tr><td>{name}<td class=n>{:.1}<td class=n>{}<td class=n>{}<td class=n>{}",
            rate(before, present, *op),
            count.single + count.batches,
            count.batches,
            count.single_failed + count.batches_failed,
        );
    }
    html.push_str("</table>");
}

fn bar(percent: f64) -> String {
    let class = if percent > 95.0 { " class=full" } else { "" };
    format!("<div class=bar><i{class} style=\"width:{:.1}%\"></i></div>", percent.clamp(0.0, 100.0))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_outside_cannot_bring_markup() {
        assert_eq!(escape("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
