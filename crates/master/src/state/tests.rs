//! The rules, called as the service calls them.
