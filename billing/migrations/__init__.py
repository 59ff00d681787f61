"""Schema changes, oldest first, in ``versions``. ``billing.store`` runs them when it opens a database."""
