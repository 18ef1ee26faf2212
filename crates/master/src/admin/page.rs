//! GET /: the web page. A single file that loads nothing from elsewhere and polls
//! `/api/v1/overview` every two seconds. GET /guide: the guide for operators, which a master serves
//! itself, since its network may reach no other site and its package holds no other documentation.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use mooncake_http::reply;

const PAGE: &str = include_str!("page/index.html");

/// The content security policy: the page may only load from and connect to its own master.
const POLICY: &str = include_str!("page/policy.txt");

const GUIDE: &str = include_str!("page/guide.txt");

/// The dashboard for Grafana, and the alerts for Prometheus, of the folder `deploy`.
const DASHBOARD: &str = include_str!("page/dashboard.json");
const ALERTS: &str = include_str!("page/alerts.yml");

/// Shows the guide of this version as text.
pub(super) async fn guide() -> Response {
    reply::text(GUIDE)
}

/// Shows the dashboard of this version, to be imported into Grafana.
pub(super) async fn dashboard() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DASHBOARD).into_response()
}

/// Shows the alerts of this version, for Prometheus.
pub(super) async fn alerts() -> Response {
    reply::text(ALERTS)
}

pub(super) async fn show() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.trim_end()),
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_loads_nothing_from_elsewhere() {
        for reference in ["http://", "https://", "<link", "src=", "@import", "url("] {
            let found = PAGE.match_indices(reference).filter(|(at, _)| {
                // The icon is a data URL, and the SVG namespace is only a name.
                !PAGE[*at..].starts_with("http://www.w3.org/2000/svg")
                    && !PAGE[*at..].starts_with("<link rel=\"icon\" href=\"data:")
            });
            assert_eq!(found.count(), 0, "{reference}");
        }
    }

    #[test]
    fn page_links_to_the_guide() {
        assert!(PAGE.contains("<a href=\"/guide\">"));
        assert!(GUIDE.starts_with("# Running a pool\n") && GUIDE.contains("/metrics"));
        for path in ["/grafana.json", "/alerts.yml"] {
            assert!(PAGE.contains(&format!("<a href=\"{path}\"")), "{path}");
        }
    }

    #[test]
    fn page_never_inserts_markup() {
        for way in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!PAGE.contains(way), "{way}");
        }
    }
}
