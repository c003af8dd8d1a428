// Loaded before the page is drawn: applies the theme that the user has chosen.
try {
  const theme = localStorage.getItem("penstock-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // without storage, the system's theme applies
}

export {};
